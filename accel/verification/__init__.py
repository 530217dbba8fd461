"""Stock against optimized: how far apart they are, and how far rounding explains."""
