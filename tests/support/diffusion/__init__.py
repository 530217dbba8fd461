"""Helpers for tests of images."""
