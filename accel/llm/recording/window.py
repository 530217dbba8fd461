"""How many keys a query sees, as told by the function that its mask was made by."""

import math
from collections.abc import Callable
from functools import lru_cache
from types import CellType, CodeType, FunctionType
from typing import Any

import torch

from accel.llm.recording.record import NotUnderstood, Record

QUERIES = (3, 77, 1500, 5003, 40_009, 200_003, 1_100_009)  # positions of queries whose view is looked at
BLOCK = 1 << 15  # keys asked about at once: what is made of them on the way stays in a core's cache


class Chunk(int):
    """A window of another kind: a query sees the keys of its own run of so many tokens, as in Llama 4."""

    def __repr__(self) -> str:
        return f"Chunk({int(self)})"


def window_through(record: Record, mask: torch.Tensor | None) -> int | None:
    """How many keys a query sees through a mask, see `window`. Raises NotUnderstood for one not made that way.

    Where the model keeps its attention, something may have been added to the mask: then all must be alike.
    """
    functions = record.makers(mask)
    for function in functions:
        if id(function) not in record.windows:
            record.windows[id(function)] = window(function)
    windows = {record.windows[id(function)] for function in functions}
    if len(windows) != 1:
        raise NotUnderstood("its attention mask is made in a way of its own")
    return windows.pop()


def window(visible: Callable[..., Any]) -> int | None:
    """Keys that a query sees at most, or of which `Chunk`; None for all. Raises NotUnderstood for other views."""
    if isinstance(visible, FunctionType) and _reads_nothing_else(visible):
        return _window_of(visible.__code__)
    return _found(of_any_length(visible))


class _Nowhere:
    """In the place of a tensor of numbers of blocks, all -1: no position is in a block, however far it is."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __getitem__(self, index: Any) -> torch.Tensor:
        places = index if isinstance(index, tuple) else (index,)
        return self.tensor.flatten()[0].cpu().expand(torch.broadcast_shapes(*(one.shape for one in places)))


def of_any_length(value: Any) -> Any:
    """The same function on a CPU, where blocks of images, of which a text has none, may be asked of any position."""
    if isinstance(value, tuple):
        return tuple(map(of_any_length, value))
    if isinstance(value, torch.Tensor):
        blocks = value.dtype in (torch.int64, torch.int32) and value.dim() and value.numel()
        # On a GPU a position behind its end would be no error, but the end of the process.
        return _Nowhere(value) if blocks and bool((value == -1).all()) else value.cpu()
    if not isinstance(value, FunctionType) or not value.__closure__:
        return value
    cells = tuple(CellType(of_any_length(cell.cell_contents)) for cell in value.__closure__)
    return FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)


def _reads_nothing_else(function: FunctionType) -> bool:
    """Whether its result depends on its arguments alone, as that of transformers' causal mask does."""
    code = function.__code__
    beside = (function.__closure__, function.__defaults__, function.__kwdefaults__, code.co_names)
    return not any(beside) and not any(isinstance(one, CodeType) for one in code.co_consts)


@lru_cache(maxsize=16)
def _window_of(code: CodeType) -> int | None:
    """Of a function that reads nothing beside its arguments."""
    return _found(FunctionType(code, {}))


def _found(visible: Callable[..., Any]) -> int | None:
    counts = {query: _count(visible, query) for query in QUERIES}
    fewer = {query: count for query, count in counts.items() if count < query + 1}
    if not fewer:
        return None
    found = next(iter(fewer.values()))
    if all(count == found for query, count in counts.items() if query >= min(fewer)):
        return found
    common, least = math.gcd(*(query + 1 - count for query, count in fewer.items())), max(counts.values())
    for chunk in (common // parts for parts in range(1, common // least + 1) if common % parts == 0):
        if all(count == query % chunk + 1 for query, count in counts.items()):
            if _count(visible, chunk - 1) == chunk and _count(visible, chunk) == 1:
                return Chunk(chunk)
    raise NotUnderstood("its attention mask is not one sliding window")


def _count(visible: Callable[..., Any], query: int) -> int:
    """How many keys up to its own a query sees, which have to be the last of them, and not the one after it."""
    zero, block = torch.zeros((), dtype=torch.int64, device="cpu"), torch.arange(BLOCK, device="cpu")
    own, first, count = torch.full_like(block, query), None, 0
    for start in range(0, query + 2, BLOCK):
        keys = block[: query + 2 - start] + start
        try:
            seen = torch.as_tensor(visible(zero, zero, own[: len(keys)], keys), device="cpu").expand(len(keys))
        except IndexError as error:  # it looks the positions up in something as long as the text
            raise NotUnderstood("its attention mask is made of more than positions") from error
        here = int(seen.count_nonzero())
        if here and first is None:
            first = start if here == len(keys) else start + int(seen.bool().byte().argmax())
        count += here
    if first is None or first + count != query + 1 or bool(seen[-1]):
        raise NotUnderstood("its attention mask is neither causal nor a sliding window")
    return count
