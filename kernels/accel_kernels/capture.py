"""Recording work into a CUDA graph, undisturbed."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: object = None) -> Iterator[None]:
    """What this thread launches inside goes into `graph` and does not run; memory comes from `pool`.

    Garbage is not collected meanwhile: destroying some other graph, which only the collector does where objects refer
    to each other, is not allowed during a capture and would break it. Other threads may go on using the GPU.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    finally:
        if collecting:
            gc.enable()
