"""Rules that diffusion and language models share."""
