"""Time to ready: `accel.optimize` and a first call in fresh processes, with empty caches, with full ones, and stock."""
