"""What fewer bits lose, and what it takes to make a model of them."""
