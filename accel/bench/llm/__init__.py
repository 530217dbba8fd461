"""Language models under generate(): stock and accel side by side, correctness first, shares of the memory's speed."""
