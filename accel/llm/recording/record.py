"""A recorded run as data: which modules were called with what, layer by layer."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn


class NotUnderstood(Exception):
    """Why a model, or a part of it, keeps its stock forward; the message goes into the report."""


NOTHING_STORED = "it stores no keys and values"


def is_absent(value: object) -> bool:
    """Whether an argument means the same as one that is not given."""
    return value is None or value is False or (isinstance(value, dict | list | tuple) and not value)


def form(value: object) -> object:
    """What an argument is like: a tensor's number of dimensions and whether it is floating-point; else its type."""
    if isinstance(value, tuple | list):
        return tuple(map(form, value))
    return (value.dim(), value.is_floating_point()) if isinstance(value, torch.Tensor) else type(value)


class Value:
    """A tensor that was seen: itself, to recognize its memory later, and a copy of its values at that time."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.held = tensor, tensor.detach().clone()

    def same(self, other: "Value | None") -> bool:
        """Whether both are the same elements of the same memory; reshaped or not."""
        return (
            other is not None
            and self.tensor.data_ptr() == other.tensor.data_ptr()
            and self.tensor.numel() == other.tensor.numel()
            and torch.equal(self.held.flatten(), other.held.flatten())
        )


def given_names(module: nn.Module) -> tuple[str, ...]:
    """What a module's forward calls its arguments behind the first."""
    return tuple(inspect.signature(type(module).forward).parameters)[2:]


@dataclass
class Call:
    """One call of a module inside a layer. taken, made: the first tensors that it was given and gave; None for none."""

    module: nn.Module
    parent: nn.Module | None
    args: tuple
    kwargs: dict
    taken: Value | None
    made: Value | None = None
    result: object = None

    @property
    def named(self) -> dict[str, Any]:
        """All that it was given behind the first argument, by name."""
        return dict(zip(given_names(self.module), self.args[1:], strict=False)) | self.kwargs

    @property
    def input(self) -> Value:
        """What it was given. Raises NotUnderstood where that is no tensor."""
        if self.taken is None:
            raise NotUnderstood(f"a {type(self.module).__name__} that is given no tensor")
        return self.taken

    @property
    def output(self) -> Value:
        """What it gave. Raises NotUnderstood where that is no tensor."""
        if self.made is None:
            raise NotUnderstood(f"a {type(self.module).__name__} that gives no tensor")
        return self.made

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that it was given."""
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, torch.Tensor)]

    @property
    def alone(self) -> bool:
        """Whether the input was the only tensor given."""
        return self.taken is not None and len(self.tensors) == 1


@dataclass
class Attended:
    """Of the recording attention function: query (rows, heads, tokens, D), and output (rows, tokens, heads, D)."""

    query: torch.Tensor
    mask: torch.Tensor | None
    options: dict
    output: torch.Tensor


class Stored(NamedTuple):
    """What a layer put into the cache, by which module, and which layer of the cache that is; keys are rotated.

    keys, values: (rows, kv heads, tokens, D), or nothing of what was forgotten.
    """

    attention: nn.Module
    place: int
    keys: torch.Tensor
    values: torch.Tensor


@dataclass
class KeptState:
    """What a layer of linear attention kept for a row, by which module, and which layer of the cache that is; where it
    has keys and values too, as many further as the cache has layers.

    inputs: (rows, channels, tokens), of its convolution; state: (rows, ...), behind the last token. None for none.
    """

    attention: nn.Module
    place: int
    inputs: torch.Tensor | None = None
    state: torch.Tensor | None = None


@dataclass
class LayerRecord:
    """One layer's run. ran: the call of the layer itself; calls: those of modules inside.

    kinds: norm kinds by settings, shared by the records of all layers. known: in an amplified record, the formula found
    in an ordinary one. borrowed: what an earlier layer stored and this one attends to. earlier: what attentions before
    the last one stored and were given, where it has several. most_positions: rows of the model's table of positions,
    None without one. shown_length: how many tokens the cache said it holds when the layer asked, None where it did not.
    """

    layer: nn.Module
    path: str
    kinds: dict
    known: Any = None
    ran: Call | None = None
    calls: list[Call] = field(default_factory=list)
    stored: Stored | None = None
    borrowed: Stored | None = None
    kept: KeptState | None = None
    attended: Attended | None = None
    earlier: list[tuple[Stored, Attended | None]] = field(default_factory=list)
    most_positions: int | None = None
    shown_length: int | None = None

    def forget(self, scores: bool) -> None:
        """Drops what was seen, which in all layers is hundreds of megabytes; `scores`: but for queries and keys."""
        self.ran, self.calls, self.kept, self.borrowed, self.earlier = None, [], None, None, []
        if not scores:
            self.stored = self.attended = None
            return
        if self.stored is not None:
            self.stored = self.stored._replace(values=self.stored.values.new_empty(0))
        if self.attended is not None:
            self.attended.mask, self.attended.output = None, self.attended.output.new_empty(0)

    @property
    def call(self) -> Call:
        """Of the layer. Raises NotUnderstood where it did not run."""
        if self.ran is None:
            raise NotUnderstood("it did not run")
        return self.ran

    @property
    def cached(self) -> Stored:
        """What it put into the cache, or found there. Raises NotUnderstood where that is nothing."""
        found = self.borrowed if self.stored is None else self.stored
        if found is None:
            raise NotUnderstood(NOTHING_STORED)
        return found

    @property
    def mixes(self) -> bool:
        """Whether it put something into the cache, or reads what another layer put there."""
        return not (self.stored is None and self.kept is None and self.borrowed is None)

    @property
    def writes(self) -> tuple[Stored, ...]:
        """All that it put into the cache, of each of its attentions."""
        return (*(one for one, _ in self.earlier), *(() if self.stored is None else (self.stored,)))

    @property
    def mixers(self) -> tuple[nn.Module, ...]:
        """The modules that put something into the cache, or read what another layer put there."""
        return tuple(one.attention for one in (*(self.writes or (self.borrowed,)), self.kept) if one is not None)

    @property
    def attention(self) -> nn.Module:
        """The module that stored keys and values, or kept a state."""
        return self.cached.attention if self.kept is None else self.kept.attention

    def name(self, module: nn.Module) -> str:
        """The module's path from the layer: specs hold names, so that a module put in another's place is seen."""
        return next(name for name, own in self.layer.named_modules() if own is module)

    @property
    def leaves(self) -> list[Call]:
        """Calls of modules that called none, or linears with adapters."""
        outer = {id(call.parent) for call in self.calls}
        return [call for call in self.calls if id(call.module) not in outer]

    def inside(self, parent: nn.Module) -> list[Call]:
        """Calls of the direct children of a module, in the order in which they ended."""
        return [call for call in self.calls if call.parent is parent]


@dataclass
class Record:
    """A whole run: the layers, and by which function (row, head, query, key) -> bool each mask was made.

    own: the model kept its own attention, and the masks are those of an earlier run. asked: it called transformers'
    attention interface. tables: see `mask_tables.narrowed`.
    """

    layers: list[LayerRecord]
    own: bool = False
    asked: bool = False
    masks: list[tuple[torch.Tensor | None, Callable]] = field(default_factory=list)
    windows: dict[int, int | None] = field(default_factory=dict)  # by the function's id
    tables: dict[int, int] = field(default_factory=dict)

    def makers(self, mask: torch.Tensor | None) -> list[Callable]:
        """The functions that a mask was made by; of all masks where the model keeps its own attention."""
        return [function for made, function in self.masks if self.own or _is(made, mask)]

    def made(self, mask: object) -> bool:
        return any(_is(made, mask) for made, _ in self.masks)


def _is(made: torch.Tensor | None, mask: object) -> bool:
    """Whether a mask is the one that was made, or a view of all of it."""
    if not isinstance(made, torch.Tensor) or not isinstance(mask, torch.Tensor):
        return made is mask
    return made is mask or (made.data_ptr() == mask.data_ptr() and made.shape == mask.shape)
