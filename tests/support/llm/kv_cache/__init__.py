"""What caches of keys and values are compared with."""
