"""Helpers for tests of language models."""
