"""Which keys a query sees, asked of the function that a model makes its masks by."""

from collections.abc import Callable
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import torch

from accel.llm.recording.errors import NotUnderstood

QUERIES = (3, 77, 1500, 5003, 40_009, 200_003, 1_100_009)  # positions of queries whose view is looked at
BLOCK = 1 << 15  # keys asked about at once: what is made of them on the way stays in a core's cache


def window(visible: Callable[..., Any]) -> int | None:
    """How many keys a query sees at most, itself included; None for all. Raises NotUnderstood for any other view."""
    if isinstance(visible, FunctionType) and _reads_nothing_else(visible):
        return _window_of(visible.__code__)
    return _found(visible)


def _reads_nothing_else(function: FunctionType) -> bool:
    """Whether what it gives hangs on its arguments alone, as of transformers' causal mask: always the same then."""
    code = function.__code__
    beside = (function.__closure__, function.__defaults__, function.__kwdefaults__, code.co_names)
    return not any(beside) and not any(isinstance(one, CodeType) for one in code.co_consts)


@lru_cache(maxsize=16)
def _window_of(code: CodeType) -> int | None:
    """Of a function that reads nothing beside its arguments."""
    return _found(FunctionType(code, {}))


def _found(visible: Callable[..., Any]) -> int | None:
    found = None
    for query in QUERIES:
        count = _count(visible, query)
        if found is not None and count != found:
            raise NotUnderstood("its attention mask is not one sliding window")
        if count < query + 1:
            found = count
    return found


def _count(visible: Callable[..., Any], query: int) -> int:
    """How many keys up to its own a query sees, which have to be the last of them, and not the one after it."""
    zero, block = torch.zeros((), dtype=torch.int64), torch.arange(BLOCK)
    own, first, count = torch.full_like(block, query), None, 0
    for start in range(0, query + 2, BLOCK):
        keys = block[: query + 2 - start] + start
        try:
            seen = torch.as_tensor(visible(zero, zero, own[: len(keys)], keys)).expand(len(keys))
        except IndexError as error:  # it looks the positions up in something as long as the text
            raise NotUnderstood("its attention mask is made of more than positions") from error
        here = int(seen.count_nonzero())
        if here and first is None:
            first = start if here == len(keys) else start + int(seen.bool().byte().argmax())
        count += here
    if first is None or first + count != query + 1 or bool(seen[-1]):
        raise NotUnderstood("its attention mask is neither causal nor a sliding window")
    return count
