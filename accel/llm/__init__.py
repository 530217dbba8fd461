"""Causal language models; so far they get the rules shared with diffusion models (norms)."""
