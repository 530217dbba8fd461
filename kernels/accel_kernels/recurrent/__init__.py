"""Linear attention: recurrences over states of a fixed size, and the convolutions before them."""
