"""The cache that a model's own code sees around fused layers: empty, as a graph of it holds for any length of text.

A model that counts positions by what its cache holds, as BART, is told that as a number on the device.
"""

from typing import Any

import torch
from accel_kernels import KV
from accel_kernels.attention.paged.kv import LENGTH
from torch.utils._pytree import tree_map_only

from accel.libraries.cache import DynamicCache
from accel.llm.parts.step import Step


class HostRead(RuntimeError):
    """A number of the device was read, of which a graph would keep that value."""


class DeviceCount:
    """A number on the device plus one on the host, as an int for sums and ranges; HostRead where its value is asked."""

    def __init__(self, held: torch.Tensor, more: int = 0):
        self.held, self.more = held, more

    def tensor(self) -> torch.Tensor:
        return self.held + self.more

    def __add__(self, other: Any) -> Any:
        return DeviceCount(self.held, self.more + other) if type(other) is int else self.tensor() + other

    __radd__ = __add__

    def _read(self, *_: Any) -> Any:
        raise HostRead("positions are counted on the host")

    __bool__ = __int__ = __index__ = __float__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _read
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__):
            return func(*tree_map_only(cls, cls.tensor, args), **tree_map_only(cls, cls.tensor, kwargs))
        first, last = (*args, None, None)[:2]
        if func is torch.arange and isinstance(first, cls) and isinstance(last, cls) and len(args) == 2:
            return torch.arange(last.more - first.more, **kwargs) + first.tensor()
        return first._read() if isinstance(first, cls) else cls._read(first)


class CountedCache(DynamicCache):
    """An empty cache that says it holds `length` tokens."""

    def __init__(self, length: torch.Tensor):
        super().__init__()
        self.length = length

    def get_seq_length(self, *_: Any, **__: Any) -> Any:
        return DeviceCount(self.length)


class DeviceNumber(torch.Tensor):
    """Integers that stay on the device, and so does what is made of them: raises HostRead where one is read."""

    held: torch.Tensor
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "DeviceNumber":
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has it as no class method
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise HostRead("positions are read on the host")
        args, kwargs = tree_map_only(cls, lambda one: one.held, (args, kwargs or {}))
        made = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda one: one if one.is_floating_point() else cls(one), made)


def empty(step: Step, kind: type[DynamicCache] = DynamicCache) -> DynamicCache:
    """Says that nothing is stored. kind: the class that the model insists on."""
    return kind()


def counted(step: Step) -> DynamicCache:
    """Says how many tokens are stored."""
    return CountedCache(_length(step))


def watched(step: Step) -> DynamicCache:
    """The same while a model is tried, see `DeviceNumber`."""
    return CountedCache(DeviceNumber(_length(step)))


def _length(step: Step) -> torch.Tensor:
    """(), or (tokens,) where one row holds several sequences: what their places in it are to be increased by."""
    kv = next(iter(step.kvs.values()))
    ragged = kv.ragged if isinstance(kv, KV) else None
    if ragged is None:
        return kv.metadata[LENGTH].clone()
    ahead, sequences = ragged.lengths - ragged.starts[: len(ragged.lengths)], ragged.token_sequences
    unused = -torch.arange(len(sequences), device=sequences.device)  # to place 0
    return torch.where(sequences < 0, unused, ahead[sequences.clamp(min=0)])
