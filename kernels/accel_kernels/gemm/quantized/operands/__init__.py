"""Factors of the tensor cores out of packed numbers, and activations in the order that they want."""
