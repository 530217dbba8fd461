"""Decoding over keys and values in 8 bits at the speed of the memory, in Gluon."""
