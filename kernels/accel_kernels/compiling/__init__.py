"""Kernels compiled in processes beside the one that launches them."""
