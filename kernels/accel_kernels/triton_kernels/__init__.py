"""The Triton kernels behind the ops. The only modules that import triton; loaded at the first call on a GPU."""
