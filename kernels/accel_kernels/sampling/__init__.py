"""Choosing the next token from logits: filters, and the draw."""
