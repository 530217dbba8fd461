"""Blocks of diffusion transformers: recorded, and what lies between their products done in one pass each."""
