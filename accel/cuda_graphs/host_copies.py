"""Tensors that a forward computes on the CPU and copies to its device: position tables, masks, sizes.

A capture refuses such copies. Inputs are on the device already, so these depend only on the module and on the shapes
and plain values of a graph. An eager call notes them; the captured call compares them, and reads them from the device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from accel_kernels.capture import capture
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from accel.errors import fatal, logged

MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)  # by a copy that a dispatch mode does not see
CHANGES = "it copies numbers of the CPU to the GPU that another call with equal inputs does not"


class HostCopy(NamedTuple):
    """host: what was copied, as it was. device: the same numbers there."""

    host: torch.Tensor
    device: torch.Tensor


class HostCopies:
    """The copies of one forward, in order. They must live as long as a graph that was captured with them."""

    def __init__(self) -> None:
        self.found: list[HostCopy] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, copies run as they are, and are kept."""

        def note(source: torch.Tensor, device: torch.device) -> torch.Tensor:
            self.found.append(HostCopy(source.detach().clone(), source.to(device)))
            return self.found[-1].device

        self.found.clear()
        with _Through(note), _Makers():
            yield

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, each is made from the numbers on the device. Raises RuntimeError where they are not the same."""
        left = iter(self.found)

        def again(source: torch.Tensor, device: torch.device) -> torch.Tensor:
            known = next(left, None)
            if known is None or known.device.device != device or not _alike(known.host, source):
                raise RuntimeError(CHANGES)
            return known.device

        with _Through(again), _Makers():
            yield
        if next(left, None) is not None:
            raise RuntimeError(CHANGES)


def capture_with_copies(
    run: Callable[[], Any], pool: Callable[[bool], Any], somewhere: Callable[[bool], bool] = bool
) -> tuple[torch.cuda.CUDAGraph, Any, HostCopies]:
    """A graph of run(), its result, and the host copies it reads, which are noted only if a first capture fails.

    pool(failed): the memory pool, another one where a capture of the last one has failed. somewhere(flag):
    whether flag holds on any rank. The eager run that notes copies waits for other ranks, so all make it, or none.
    """
    graph, copies, made = torch.cuda.CUDAGraph(), HostCopies(), None
    failure: Exception | None = None
    try:
        with capture(graph, pool(False)):
            made = run()
    except Exception as error:
        logged(error)
        failure = error
    if not somewhere(failure is not None):
        return graph, made, copies
    if somewhere(failure is not None and fatal(failure)):
        raise failure or RuntimeError("another rank could not capture it")
    del graph, made
    with copies.noted():
        run()
    if failure is not None:
        if not copies.found:
            raise failure
        failure = None  # and lets go of what its frames hold
    graph = torch.cuda.CUDAGraph()
    with capture(graph, pool(True)), copies.replayed():
        return graph, run(), copies


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def _leaves_host(source: Any, device: torch.device) -> bool:
    return isinstance(source, torch.Tensor) and source.device.type == "cpu" and device.type != "cpu"


class _Through(TorchDispatchMode):
    """Copies from the CPU to another device take their numbers from moved(source, device)."""

    def __init__(self, moved: Any):
        super().__init__()
        self.moved = moved

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            device = kwargs.get("device")
            if device is not None and _leaves_host(args[0], device):
                # A copy of it: what is moved may be written to, and is laid out as the caller asks.
                return func(self.moved(args[0], device), **kwargs | {"non_blocking": True})
        elif func is torch.ops.aten.copy_.default and _leaves_host(args[1], args[0].device):
            return func(args[0], self.moved(args[1], args[0].device), **kwargs)
        return func(*args, **kwargs)


class _Makers(TorchFunctionMode):
    """Tensors made on another device from numbers of Python or of the CPU are made on the CPU, and copied."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func in MAKERS and device is not None and torch.device(device).type != "cpu":
            given = args[0] if args else kwargs.get("data", kwargs.get("obj"))
            if not isinstance(given, torch.Tensor) or given.device.type == "cpu":
                return func(*args, **kwargs | {"device": "cpu"}).to(device)
        return func(*args, **kwargs)
