"""The table of learned or precomputed positions that a model reads, found in a run by what is read from it.

A table is whatever the model holds, or makes of what it holds alone, from which rows are taken by numbers that count
the tokens of a text. Its shape says nothing: a weight may have as many rows as there are positions.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from accel.parallel.sharded_layers import local

ATEN = torch.ops.aten
RAISING: AbstractContextManager = nullcontext()  # a CPU looks before it reads


class PositionTable(TorchDispatchMode):
    """While active, sees which tables are read by position. tokens: of each text that the model is run on.

    most: positions that there are, of the smallest table; None where none was read.
    """

    def __init__(self, model: nn.Module, tokens: int):
        super().__init__()
        self.tokens = tokens
        self.most: int | None = None
        self.held = WeakValueDictionary[int, torch.UntypedStorage]()  # of the model, and made of that alone
        for tensor in (*model.parameters(), *model.buffers()):
            self._hold(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [*_tensors(args), *_tensors((kwargs or {}).values())]
        if given and all(map(self._holds, given)):
            for one in _tensors((result,)):
                self._hold(one)
        for table, dim, numbers in _reads(func.overloadpacket, args):
            first = self._first(numbers) if self._holds(table) else None
            if first is not None:
                most = table.shape[dim] - first
                self.most = most if self.most is None else min(self.most, most)
        return result

    def _hold(self, tensor: torch.Tensor) -> None:
        memory = _memory(tensor)
        if memory is not None:
            self.held[memory.data_ptr()] = memory

    def _holds(self, tensor: torch.Tensor) -> bool:
        memory = _memory(tensor)
        return memory is not None and memory.data_ptr() in self.held

    def _first(self, numbers: torch.Tensor) -> int | None:
        """That of the first token, where the numbers count tokens; they come text by text."""
        if numbers.is_floating_point() or numbers.dtype is torch.bool or not numbers.numel():
            return None
        if self.tokens < 2 or numbers.shape[-1] % self.tokens:
            return None
        texts = numbers.reshape(-1, self.tokens)
        return int(texts[0, 0]) if bool((texts.diff() == 1).all()) else None


def within_tables() -> AbstractContextManager:
    """Inside, reading behind a table's end raises an error, where on a GPU it would end the process."""
    return WithinTables() if torch.accelerator.is_available() else RAISING


class WithinTables(TorchDispatchMode):
    """While active, to read behind the end of a table raises IndexError before it happens. Waits for the GPU."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        operation = getattr(func, "overloadpacket", None)
        for table, dim, numbers in _reads(operation, args):
            if numbers.numel() and not numbers.is_meta:
                least, most = (int(one) for one in local(numbers).aminmax())
                if most >= table.shape[dim] or least < (-table.shape[dim] if operation is ATEN.index else 0):
                    raise IndexError(f"numbers from {least} to {most}, of a table with {table.shape[dim]}")
        return func(*args, **(kwargs or {}))


def _tensors(values: Iterable) -> Iterator[torch.Tensor]:
    """Those among the arguments or results of an operation, and in its lists."""
    for one in values:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)


def _reads(function: Any, args: tuple) -> Iterator[tuple[torch.Tensor, int, torch.Tensor]]:
    """What is read by numbers in this call: from which tensor, along which dimension, by which numbers."""
    if function is ATEN.embedding:
        yield args[0], 0, args[1]
    elif function is ATEN.index_select:
        yield args[0], args[1], args[2]
    elif function is ATEN.gather:
        yield args[0], args[1], args[2].movedim(args[1], -1)
    elif function is ATEN.index:
        numbers = [(dim, one) for dim, one in enumerate(args[1]) if one is not None and one.dim()]
        if not any(one.dtype in (torch.bool, torch.uint8) for _, one in numbers):  # of several dimensions at a time
            yield from ((args[0], dim, one) for dim, one in numbers)


def _memory(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """That of a tensor and its views; None for one without memory of its own, such as one of several ranks."""
    try:
        memory = tensor.untyped_storage()
        return memory if memory.data_ptr() else None
    except (RuntimeError, NotImplementedError):
        return None
