"""Choosing the next token from logits: filters, noise, and the draw."""
