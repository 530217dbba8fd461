"""Weights of linear layers in fewer bits: rounding, the module that holds them, and putting it in place and back."""
