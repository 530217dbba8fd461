"""This project's own measurements, by name: `python -m benchmarks`."""
