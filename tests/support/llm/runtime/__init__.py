"""What routers of mixtures are compared by."""
