"""Benchmarks: real model sizes with random weights, correctness before speed, JSON with the machine it ran on."""
