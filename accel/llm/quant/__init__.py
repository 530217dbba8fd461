"""Quantised language models: calibration, saving, loading, and what arrives quantised."""
