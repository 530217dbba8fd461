"""The demo: models that ship, each loaded twice, one copy optimized, and the two taking turns at the same work."""
