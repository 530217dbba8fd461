"""Activations, gates and softmax."""
