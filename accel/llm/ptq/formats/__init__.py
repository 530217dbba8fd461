"""Quantized models in files: compressed-tensors, and what arrives from other libraries."""
