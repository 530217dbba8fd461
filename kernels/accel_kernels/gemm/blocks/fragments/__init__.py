"""Kernels that read blocks as factors of the tensor cores, straight into registers."""
