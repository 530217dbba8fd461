"""A whole language model under generate(): its forward, prefill, self-test."""
