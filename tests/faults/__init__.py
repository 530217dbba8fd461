"""Ways to break the product on purpose, and a runner that tells which of them the tests see: `python -m tests.faults`."""
