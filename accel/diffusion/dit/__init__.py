"""Blocks of diffusion transformers: recorded, then run as fused passes between their products."""
