"""Products with weights in the blocks of other libraries' files."""
