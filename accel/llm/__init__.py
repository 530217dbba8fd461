"""Causal language models: layers recognized by what they compute, fused over a store of keys and values."""
