"""Attention over sequences of different lengths that stand one behind another."""
