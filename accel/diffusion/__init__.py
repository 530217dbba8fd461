"""Diffusion models: UNets, VAEs and the text encoders beside them."""
