"""Calls of an operation that must not reach the user as an error or a wrong result: kernels that a GPU refuses, and
kernels that no test ran on a GPU of its generation. The latter are compared with the reference at the first call of a
kind.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any

import torch

from accel_kernels.device import card
from accel_kernels.errors import KernelRefused, out_of_memory
from accel_kernels.tolerances import BACKEND, SMALLEST_OUTPUT

AGREES = "agrees with its reference"
UNCHECKED = "not checked against its reference: no memory for that"
WRITTEN = ("out", "outputs")  # arguments that are written, and given back
MOST = 2**28  # bytes of arguments that are copied for a check


class KernelOutcomes:
    """What became of the kernels of one operation in this process.

    reference: plain torch, which runs where a kernel is refused or wrong. changes: whether it changes what it is given,
    so that it must not run twice. outcomes: by kind of call, see `kind_of`, AGREES, UNCHECKED or what is wrong.
    """

    def __init__(self, reference: Callable[..., Any], changes: bool):
        self.reference, self.changes = reference, changes
        self.outcomes: dict[Any, str] = {}

    def run(self, kernel: Callable[..., Any], other: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """kernel(*args, **kwargs); other(*args, **kwargs) where it is refused; the reference where that is, too."""
        for one in (kernel, other):
            try:
                return one(*args, **kwargs)
            except KernelRefused as refused:
                self.outcomes[refused.kernel] = str(refused)
        return self.reference(*args, **kwargs)

    def run_checked(self, kernel: Callable[..., Any], other: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The same; the first call of a kind is compared with the reference. While capturing none is."""
        if kernel == self.reference:
            return kernel(*args, **kwargs)
        kind = kind_of((kernel == other, getattr(kernel, "keywords", None), args, kwargs))
        if (known := self.outcomes.get(kind)) in (AGREES, UNCHECKED):
            return self.run(kernel, other, *args, **kwargs)
        if known is not None:
            return self.reference(*args, **kwargs)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return self.run(kernel, other, *args, **kwargs)
        apart = self.changes or any(kwargs.get(name) is not None for name in WRITTEN)
        try:
            given, more = copied((args, kwargs)) if apart else (args, kwargs)
            wanted = self.reference(*given, **more)
        except Exception as error:
            if not out_of_memory(error):
                raise
            self.outcomes[kind] = UNCHECKED
            return self.run(kernel, other, *args, **kwargs)
        got = self.run(kernel, other, *args, **kwargs)
        changed = ((args, kwargs), (given, more)) if self.changes else ((), ())
        off = difference((got, changed[0]), (wanted, changed[1]))
        self.outcomes[kind] = AGREES if off <= BACKEND else f"off by {off:.2g} of the largest number: plain torch runs"
        if off <= BACKEND:
            return got
        for one, right in zip(*map(tensors, changed), strict=True):
            one.copy_(right)
        return wanted if not apart or self.changes else self.reference(*args, **kwargs)

    def rows(self) -> list[str]:
        """What there is to tell, each once."""
        checked = sum(outcome == AGREES for outcome in self.outcomes.values())
        told = [f"no test ran on such a card: {checked} kinds of calls checked, which agree"] if checked else []
        return told + list(dict.fromkeys(outcome for outcome in self.outcomes.values() if outcome != AGREES))


def needs_check(device: torch.device) -> bool:
    """Whether kernels are checked on this device at their first calls."""
    return device.type == "cuda" and not card(device).measured


def kind_of(value: Any) -> tuple:
    """What decides which kernel serves a call, about: dtypes, flags, and sizes up to a power of two."""
    found: list[Any] = []
    _note(value, found)
    return tuple(found)


def _note(value: Any, found: list[Any]) -> None:
    """Appends what tells the kind of a value. Each call of an operation asks, so that it is written for speed."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        found += value.dtype, _magnitudes(value.shape), value.is_contiguous()
    elif value is None or kind is bool or kind is str or kind is torch.dtype:
        found.append(value)
    elif kind is int:
        found.append(value.bit_length())
    else:
        found.append(kind.__name__)
        for part in inside(value) or ():
            _note(part, found)


@lru_cache(4096)
def _magnitudes(sizes: torch.Size) -> tuple[int, ...]:
    return tuple(size.bit_length() for size in sizes)


def inside(value: Any) -> list | None:
    """The parts of a value, in order; None where it has none."""
    if isinstance(value, dict):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, tuple | list):
        return [*value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, name) for name in _names(type(value))]
    return None


@cache
def _names(kind: Any) -> tuple[str, ...]:
    """Of the fields of a dataclass."""
    return tuple(field.name for field in dataclasses.fields(kind))


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those inside, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    for part in inside(value) or ():
        yield from tensors(part)


def copied(value: Any) -> Any:
    """With tensors of their own, laid out alike. Raises MemoryError where they are large."""
    if sum(one.nbytes for one in tensors(value)) > MOST:
        raise MemoryError("large")
    return _rebuilt(value)


def _rebuilt(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        span = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
        flat = value.as_strided((span if value.numel() else 0,), (1,)).clone()
        return flat.as_strided(value.shape, value.stride())
    if isinstance(value, dict):
        return {name: _rebuilt(part) for name, part in value.items()}
    if hasattr(value, "_replace"):
        return value._replace(**{name: _rebuilt(getattr(value, name)) for name in value._fields})
    if isinstance(value, tuple | list):
        return type(value)(map(_rebuilt, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{one.name: _rebuilt(getattr(value, one.name)) for one in dataclasses.fields(value) if one.init}
        )
    return value


def difference(got: Any, wanted: Any) -> float:
    """The largest difference of two results by the largest number; infinite where they are not of one form.

    What a kernel gives where its reference gives None, as channel stats, is compared where it is used.
    """
    if wanted is None:
        return 0.0
    if isinstance(wanted, torch.Tensor):
        return _off(got, wanted)
    ours, theirs = inside(got) or [], inside(wanted) or []
    return max(map(difference, ours, theirs), default=0.0) if len(ours) == len(theirs) else float("inf")


def _off(got: Any, wanted: torch.Tensor) -> float:
    if not isinstance(got, torch.Tensor) or got.shape != wanted.shape:
        return float("inf")
    got, wanted = got.double(), wanted.double()
    alike = (got == wanted) | (got.isnan() & wanted.isnan())
    off = torch.where(alike, 0.0, (got - wanted).abs())
    peak = torch.where(wanted.isfinite(), wanted, 0.0).abs().max() if wanted.numel() else wanted.new_zeros(())
    found = float((off / peak.clamp_min(SMALLEST_OUTPUT)).max()) if off.numel() else 0.0
    return found if found == found else float("inf")
