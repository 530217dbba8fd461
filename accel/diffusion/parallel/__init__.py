"""One image on many cards: rows of a denoiser's batch, and tiles of a decoder, are divided among ranks."""
