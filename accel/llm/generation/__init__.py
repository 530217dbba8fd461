"""A whole language model under generate(): its forward, prefill, lookahead, and the hooks that meet them."""
