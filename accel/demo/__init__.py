"""The demo: models that ship, each loaded twice, one copy optimised, and the two taking turns at the same work."""
