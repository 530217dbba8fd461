"""Models that arrive quantized, as other libraries make and save them."""
