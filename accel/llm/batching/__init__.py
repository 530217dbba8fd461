"""Continuous batching: many requests of different lengths in one model, in one step after another."""
