"""The pictures of docs/images, drawn from benchmarks/results."""
