"""Helpers for tests of video."""
