"""Keys and values in blocks, behind the cache class that transformers knows."""
