"""Products of a plan: what one computes, which are one product, and rows that are rounded to 8 bits for them."""
