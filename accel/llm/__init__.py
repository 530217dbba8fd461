"""Causal language models: layers recognised by what they compute, fused over a store of keys and values."""
