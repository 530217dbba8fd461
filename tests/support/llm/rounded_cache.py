"""Stock transformers over a cache that rounds what it is given: what kv_cache="int8" and "fp8" must compute."""

from contextlib import contextmanager

import torch
from accel_kernels.attention.paged.kv_quantization import restored, rounded
from transformers import DynamicCache

from support.llm import optimized_models
from support.llm.families import prompt


@contextmanager
def rounding(codes: torch.dtype, except_layer: int | None = None):
    """Inside, every dynamic cache rounds what it is given."""
    update, init = DynamicCache.update, DynamicCache.__init__

    def rounds(self, keys, values, layer, *args, **kwargs):
        if layer != except_layer:
            keys, values = (restored(*rounded(t, codes), t.dtype) for t in (keys, values))
        return update(self, keys, values, layer, *args, **kwargs)

    def plain(self, *args, config=None, **kwargs):  # layers with a window forget, and ours keep; masks hide the rest
        init(self, *args, **kwargs)

    DynamicCache.update, DynamicCache.__init__ = rounds, plain
    try:
        yield
    finally:
        DynamicCache.update, DynamicCache.__init__ = update, init


def pair(name: str, kind: str):
    """(optimized, stock) that a test may change."""
    return optimized_models.pair(name, kv_cache=kind)


def held(kind: str = "int8", rows: int = 2, tokens: int = 9):
    """An optimized model, a cache that it has filled, and its tokens."""
    ours, stock = pair("llama", kind)
    ids, cache = prompt(rows, tokens), DynamicCache()
    ours(ids, past_key_values=cache)
    return ours, stock, ids, cache
