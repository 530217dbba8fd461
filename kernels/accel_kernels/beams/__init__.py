"""Beam search: what follows the logits of a step."""
