"""Recording work into a CUDA graph, undisturbed."""

import ctypes
import functools
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from accel_kernels.device import cuda_driver

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: what others launch on the default stream does not belong to the capture


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """What this thread launches inside goes into `graph` and does not run; memory comes from `pool`.

    On a stream of the current device of its own; one capture of a device at a time, another thread's
    waits. Garbage is not collected meanwhile: destroying some other graph, which only the collector does where objects
    refer to each other, is not allowed during a capture and would break it. Other threads may go on using the GPU.
    """
    device, pool = torch.cuda.current_device(), torch.cuda.graph_pool_handle() if pool is None else pool
    stream, turn = _place(device)
    with turn, torch.cuda.stream(torch.cuda.current_stream()):  # else a failed capture's stream stays the current one
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                yield
        except BaseException:
            _clean_up(device, stream, pool)
            raise
        finally:
            if collecting:
                gc.enable()


def _clean_up(device: int, stream: torch.cuda.Stream, pool: Any) -> None:
    """Ends what torch leaves open where CUDA refuses to end a capture: memory goes to its pool, which is never given
    back, and random numbers are refused outside of a capture, until one succeeds. Pinned memory goes on to be recorded
    to the pool from torch 2.11 on: other captures need another one.
    """
    with suppress(RuntimeError):  # the capture has ended, it was something else that failed
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    with suppress(RuntimeError), torch.cuda.stream(stream):  # the GPU has failed
        zero, another = torch.zeros((), device=stream.device), torch.cuda.CUDAGraph()
        another.capture_begin(capture_error_mode="thread_local")
        zero.zero_()  # torch warns of an empty one
        another.capture_end()


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
        driver = cuda_driver()
    except OSError:  # another system or another maker's GPU
        return torch.cuda.Stream(device)
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # the first call on a device makes the context that this asks for
        code = driver.cuStreamCreate(ctypes.byref(handle), NON_BLOCKING)
    if code:
        raise RuntimeError(f"no stream to capture a CUDA graph on: the driver says error {code}")
    return torch.cuda.ExternalStream(handle.value, device=device)
