"""Linears of other libraries whose weights are read in the blocks in which they lie."""
