"""Weights in fewer bits that a CPU writes out once, for as long as a model is only looked at."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch


class _Kept:
    """Results by weight, of at most `room` bytes together, for as long as the weights live."""

    def __init__(self, room: int):
        self.room = room
        self.results: dict[tuple, tuple[torch.Tensor, list[weakref.ref]]] = {}

    def add(self, key: tuple, result: torch.Tensor, parts: list[torch.Tensor]) -> None:
        if result.nbytes + sum(one.nbytes for one, _ in self.results.values()) <= self.room:
            forget = partial(_forget, self.results, key)  # another weight may come to lie there
            own = (part if part._base is None else part._base for part in parts)
            self.results[key] = result, [weakref.ref(one, forget) for one in own]


def _forget(results: dict, key: tuple, _: object) -> None:
    results.pop(key, None)


_KEPT: ContextVar[_Kept | None] = ContextVar("accel_kernels_dequantized", default=None)


@contextmanager
def keep_dequantized(room: int) -> Iterator[None]:
    """Inside, on this thread, what a weight on the CPU stands for is computed once, as far as there is room.

    room: bytes. A weight that has changed since, as autograd counts, is computed anew; of one in inference mode nothing
    is kept, since nobody counts.
    """
    token = _KEPT.set(_Kept(room))
    try:
        yield
    finally:
        _KEPT.reset(token)


def forget_dequantized() -> None:
    """Gives the memory back early, of which something else has need; no more is kept."""
    if (kept := _KEPT.get()) is not None:
        kept.results.clear()
        kept.room = 0


def dequantized_once(
    parts: Iterable[torch.Tensor | None], dtype: torch.dtype, write: Callable[[torch.dtype], torch.Tensor]
) -> torch.Tensor:
    """`write(dtype)`, or what it gave before for these parts of a weight."""
    kept = None if torch.compiler.is_compiling() else _KEPT.get()
    if kept is None:
        return write(dtype)
    tensors = [one for one in parts if one is not None]
    if any(one.device.type != "cpu" or one.is_inference() for one in tensors):
        return write(dtype)
    key = dtype, *((one.data_ptr(), one.shape, one.stride(), one._version) for one in tensors)
    if key in kept.results:
        return kept.results[key][0]
    result = write(dtype)
    kept.add(key, result, tensors)
    return result
