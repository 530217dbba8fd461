"""Kernels by themselves: in CUDA graphs, beside torch's own operations, and in other tiles than those chosen."""
