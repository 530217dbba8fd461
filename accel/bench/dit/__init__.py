"""Diffusion transformers and decoders of video at published sizes, with random weights."""
