"""From what a user hands over to the patches of each model in it."""
