"""Continuous batching by ranks that share a model: one of them takes requests in, all run them in lockstep."""
