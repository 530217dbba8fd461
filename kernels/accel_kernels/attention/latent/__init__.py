"""Multi-head latent attention: keys and values are products of one latent a token, which alone is stored."""
