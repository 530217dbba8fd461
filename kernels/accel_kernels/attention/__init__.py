"""Attention: without a mask, over a store of keys and values, and which implementation to take."""
