"""Passes over channels-last images."""
