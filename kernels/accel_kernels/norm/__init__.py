"""Norms, with the sums before and the activations after them."""
