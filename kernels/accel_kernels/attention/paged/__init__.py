"""Attention over a store of keys and values: prefill and decode, in 16 bits or 8."""
