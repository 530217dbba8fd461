"""Matrix products with what stands before and after them."""
