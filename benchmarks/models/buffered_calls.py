"""Calls as a runner of CUDA graphs makes them, on a CPU: adapters are read from buffers."""

from collections.abc import Callable
from typing import TypeVar

from accel.cuda_graphs.adapter_buffers import AdapterBuffers

T = TypeVar("T")


def buffered(buffers: AdapterBuffers, call: Callable[[], T]) -> T:
    """The second of two calls: the first one finds out the factor, and makes buffers that were not there."""
    with buffers.used():
        buffers.follow()
        found = call()
        if buffers.fresh:
            buffers.follow()
            found = call()
        buffers.asked.clear()
        buffers.fill(buffers.factor)
        buffers.advance()
        return call() if buffers.groups else found
