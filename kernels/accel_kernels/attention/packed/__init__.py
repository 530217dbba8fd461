"""Attention of sequences of different lengths that lie one behind another."""
