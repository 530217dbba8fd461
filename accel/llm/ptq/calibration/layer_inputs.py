"""What every decoder layer is called with, for batches of text: taken once, then handed on from layer to layer."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from accel.llm.recording.resting import resting
from accel.patching.rule import set_data
from accel.patching.structure import placement


@contextmanager
def lent(module: nn.Module, device: torch.device | None, changed: bool = False) -> Iterator[None]:
    """Inside, the parameters and buffers of a module are on the device, or where they are for None; after, back.

    changed: what was done to their values inside stays; else they have the very memory they had before.
    """
    held = {id(one): one for one in chain(module.parameters(), module.buffers())} if device is not None else {}
    before = [(one, one.detach()) for one in held.values()]
    try:
        for one, _ in before:
            set_data(one, lambda data: data.to(device, copy=True))
        yield
    finally:
        for one, data in before:
            set_data(one, lambda now, home=data: now.to(home.device) if changed else home)


def moved(value: Any, device: torch.device | None) -> Any:
    """With all tensors in it, in tuples, lists and dicts, on the device; None: where they are."""
    return value if device is None else tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


class LayerCall(NamedTuple):
    """A layer's arguments; its hidden states are at `place`. kept: (rows * tokens,) bool, no padding; None for all."""

    args: tuple
    kwargs: dict
    place: int | str
    kept: Tensor | None

    @property
    def hidden(self) -> Tensor:
        return self.args[self.place] if isinstance(self.place, int) else self.kwargs[self.place]

    def given(self, hidden: Tensor | None) -> "LayerCall":
        """The same with other hidden states."""
        if isinstance(self.place, int):
            return self._replace(args=(*self.args[: self.place], hidden, *self.args[self.place + 1 :]))
        return self._replace(kwargs=self.kwargs | {self.place: hidden})

    def on(self, device: torch.device | None) -> "LayerCall":
        """The same with all its tensors there; None: where they are."""
        return LayerCall(moved(self.args, device), moved(self.kwargs, device), self.place, moved(self.kept, device))

    def rows(self, tensor: Tensor) -> Tensor:
        """(tokens that count, channels) of a tensor (..., channels); all rows where they are not the call's tokens."""
        if self.kept is not None:
            each = tensor.flatten(1, 2) if tensor.dim() == 4 else tensor.flatten(0, -2)
            tensor = each[..., self.kept, :] if each.shape[-2] == len(self.kept) else tensor
        return tensor.flatten(0, -2)


class LayerInputs:
    """The calls of every layer, one a batch.

    The model runs once through its own forward, which shows masks, positions and whatever else each layer is given;
    those do not change. Hidden states are kept for one layer only: the next layer's are the outputs of the one before,
    where the model was seen to hand them on untouched; where it was not, all is taken anew from a run up to that layer.

    device: where layers run, one at a time, and their calls are given; the rest of the model stays where it is. None:
    all stays there.

    Raises ValueError where a batch does not lead once and in turn through every layer.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str,
        layers: nn.ModuleList,
        batches: Sequence[dict[str, Tensor]],
        device: torch.device | None = None,
    ):
        self.model, self.path, self.layers, self.at, self.device = model, path, layers, 0, device
        self.home, _ = placement(model)
        self.batches = [moved(dict(batch), self.home) for batch in batches]
        self.chained = [True] * len(layers)
        versions = _versions(layers)
        seen = [self._run(batch, len(layers) - 1) for batch in self.batches]
        if _versions(layers) != versions:
            raise ValueError("the model writes into its weights as it runs; load it anew, and quantize it by 'rtn'")
        self.calls = [[calls[number].given(None) for calls in seen] for number in range(len(layers))]
        self.hidden: list[Tensor] | None = [calls[0].hidden for calls in seen]

    def now(self) -> list[LayerCall]:
        """Of the layer in turn. Raises ValueError for NaN or Inf among its hidden states."""
        if self.hidden is None:
            calls = [self._run(batch, self.at)[-1] for batch in self.batches]
        else:
            calls = [call.given(own) for call, own in zip(self.calls[self.at], self.hidden, strict=True)]
        calls = [call.on(self.device) for call in calls]
        for number, call in enumerate(calls):
            if not bool(call.rows(call.hidden).isfinite().all()):
                where = f"{self.path}.{self.at}"
                raise ValueError(f"{where}: NaN or Inf among its inputs, for batch {number} of the calibration")
        return calls

    def next(self, outputs: list[Tensor]) -> None:
        """The next layer's turn, after this one gave these."""
        self.calls[self.at] = []
        self.at += 1
        self.hidden = outputs if self.at < len(self.layers) and self.chained[self.at] else None

    def _run(self, batch: dict[str, Tensor], last: int) -> list[LayerCall]:
        """The calls of the layers up to `last`, without the hidden states of those between."""
        calls: list[LayerCall] = []
        given_back: tuple[Tensor, ...] = ()
        kept = _kept(batch)

        def enter(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            number, place = len(calls), _place(args, kwargs)
            if module is not self.layers[number] or place is None:
                raise ValueError(f"{self._where(number)} is not called once and in its turn: only 'rtn' can be used")
            call = LayerCall(args, dict(kwargs), place, kept)
            if number and not _chained(call, given_back):
                self.chained[number] = False
            calls.append(call if number in (0, last) else call.given(None))
            if number == last:
                raise _Reached
            lending.enter_context(lent(module, self.device))
            return moved((args, kwargs), self.device)

        def leave(module: nn.Module, args: tuple, kwargs: dict, result: object) -> object:
            nonlocal given_back
            lending.close()
            result = moved(result, None if self.device is None else self.home)
            given_back = tuple(_tensors(result))
            return result

        with ExitStack() as undo, ExitStack() as lending, resting(self.model):
            for layer in self.layers[: last + 1]:
                undo.callback(layer.register_forward_pre_hook(enter, with_kwargs=True).remove)
                undo.callback(layer.register_forward_hook(leave, with_kwargs=True).remove)
            try:
                type(self.model).forward(self.model, **{"use_cache": False, **batch})
            except _Reached:
                return calls
        raise ValueError(f"{self._where(len(calls))} is not called: only 'rtn' can be used")

    def _where(self, number: int) -> str:
        return f"{self.path}.{number}"


class _Reached(Exception):
    """The layer asked for."""


def first(result: object) -> Tensor:
    """The first tensor of what a layer gives back."""
    return next(_tensors(result))


def _tensors(result: object) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for part in result:
            yield from _tensors(part)


def _place(args: tuple, kwargs: dict) -> int | str | None:
    """Of the first tensor among the arguments."""
    places = (*enumerate(args), *kwargs.items())
    return next((place for place, value in places if isinstance(value, Tensor)), None)


def _chained(call: LayerCall, given_back: tuple[Tensor, ...]) -> bool:
    """Whether a layer was given of what the layer before gave back the first tensor, as it is, and no other."""
    others = {id(tensor) for tensor in _tensors((*call.given(None).args, *call.given(None).kwargs.values()))}
    return bool(given_back) and call.hidden is given_back[0] and others.isdisjoint(map(id, given_back))


def _kept(batch: dict[str, Tensor]) -> Tensor | None:
    mask = batch.get("attention_mask")
    return None if mask is None or mask.dim() != 2 or bool(mask.all()) else mask.flatten().bool()


def _versions(layers: nn.ModuleList) -> list[int]:
    return [p._version for p in layers.parameters() if not p.is_inference()]
