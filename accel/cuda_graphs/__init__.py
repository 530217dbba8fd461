"""CUDA graphs of whole forwards: captured lazily, never stale, bounded in memory."""
