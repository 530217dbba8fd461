"""Sums over GPUs of one host, by memory that each of them can read of the others."""
