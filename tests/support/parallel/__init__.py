"""Diffusion models divided among ranks."""
