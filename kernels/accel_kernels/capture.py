"""Recording work into a CUDA graph, undisturbed."""

import ctypes
import functools
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: what others launch on the default stream does not belong to the capture


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """What this thread launches inside goes into `graph` and does not run; memory comes from `pool`.

    On a stream of the current device of its own; one capture of a device at a time, another thread's
    waits. Garbage is not collected meanwhile: destroying some other graph, which only the collector does where objects
    refer to each other, is not allowed during a capture and would break it. Other threads may go on using the GPU.
    """
    stream, turn = _place(torch.cuda.current_device())
    with turn:
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                yield
        finally:
            if collecting:
                gc.enable()


@functools.cache
def _place(device: int) -> tuple[torch.cuda.Stream, threading.RLock]:
    """The stream that graphs of a device are captured on, and the lock for it.

    torch hands out 32 streams in turns, and takes the one for captures from among them: a user's thread may be given
    the very same, and all that it launches meanwhile would become part of the graph. The driver gives one more.
    """
    return stream_of_its_own(device), threading.RLock()


def stream_of_its_own(device: torch.device | int) -> torch.cuda.Stream:
    """A stream that torch gives to nobody, where the driver can be asked for one."""
    handle = ctypes.c_void_p()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # another system or another maker's GPU
        return torch.cuda.Stream(device)
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # the first call on a device makes the context that this asks for
        code = driver.cuStreamCreate(ctypes.byref(handle), NON_BLOCKING)
    if code:
        raise RuntimeError(f"no stream to capture a CUDA graph on: the driver says error {code}")
    return torch.cuda.ExternalStream(handle.value, device=device)
