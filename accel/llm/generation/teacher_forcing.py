"""Compares a deep model layer by layer: each fused layer is given what stock's layer before it gave (teacher forcing).

So no layer amplifies the rounding of others, and an error in masks, positions or the order of layers is as large as in
a model of one layer.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.linalg import vector_norm

from accel.comparison import relative_rms_by_token
from accel.in_flight import listening
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.layer_forward import LayerForward
from accel.llm.generation.trial import PADDING, Expected, as_good, stock_logits
from accel.tolerances import ADDED, FORMULA, SUM_EPS, bound

Outputs = dict[nn.Module, list[torch.Tensor]]


def differing_part(forward: DecoderForward, lengths: tuple[int, ...], fused: Callable[[], torch.Tensor]) -> str | None:
    """Says which layer, or what follows the layers, differs from stock's for the same input; None where all agree.

    fused: gives the logits of a trial of these lengths, with fused forwards in place. Runs it and stock once more.
    """
    with _noting(forward) as outputs:
        wanted, _ = stock_logits(forward, lengths)
    with wanted.routed(), _following(forward, outputs) as followers:
        got = fused()
    far = [one for one in followers if not one.agreed()]
    exact = _exact(forward, outputs, wanted) if far else {}
    apart = next((one.layer.path for one in far if not one.is_as_good(exact.get(one.layer.module, []))), None)
    if apart is not None:
        return f"{apart} gives something else than stock's of the same input"
    # NaN is no number to compare: what is not near is far.
    if not bool((relative_rms_by_token(got, wanted.logits) <= bound(FORMULA, forward.embeddings().dtype)).all()):
        return "logits are others where the last layer gives what stock's gives"
    return None


class Follower:
    """Takes the place of `LayerForward.bound`: compares its output with stock's, and passes on stock's."""

    def __init__(self, layer: LayerForward, outputs: list[torch.Tensor], dtype: torch.dtype):
        self.layer, self.bound, self.outputs, self.dtype = layer, layer.bound, outputs, dtype
        self.calls, self.agrees = 0, True
        self.given: list[tuple[torch.Tensor, torch.Tensor]] = []  # what it gave, and the norms of what stock's added

    def agreed(self) -> bool:
        """Whether it was called as often as stock's, with the same results."""
        return self.agrees and self.calls == len(self.outputs)

    def is_as_good(self, exact: list[torch.Tensor]) -> bool:
        """Whether it is as near as stock's to what full precision gives, by what a layer adds to a token."""
        if not self.calls == len(self.outputs) == len(exact):
            return False
        errors = []
        for number, (wide, stock, (got, added)) in enumerate(zip(exact, self.outputs, self.given, strict=True)):
            pair = [vector_norm(one.double() - wide.double(), dim=-1) / added.clamp_min(1e-30) for one in (stock, got)]
            errors.append(torch.stack(pair)[:, :, 0 if number else PADDING :])
        own, ours = torch.cat(errors, dim=2)
        return as_good(own, ours, bound(ADDED, self.dtype))

    def __call__(self, kernels: Any, step: Any, x: torch.Tensor, kwargs: dict) -> torch.Tensor:
        wanted = self.outputs[self.calls].to(x.device)
        added = vector_norm(wanted.double() - x.double(), dim=-1)  # before: a layer may add to its input in place
        got = self.bound(kernels, step, x, kwargs)
        near = _near(got, wanted, added, self.dtype)
        hidden = 0 if self.calls else PADDING
        self.calls, self.agrees = self.calls + 1, self.agrees and bool(near[:, hidden:].all())
        self.given.append((got, added))
        return wanted


def _near(got: torch.Tensor, wanted: torch.Tensor, added: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """By token, whether rounding explains the difference. added: norms of what stock's layer added. dtype: layers'."""
    error, whole = vector_norm(got.double() - wanted.double(), dim=-1), vector_norm(wanted.double(), dim=-1)
    return error <= SUM_EPS * torch.finfo(wanted.dtype).eps * whole + bound(ADDED, dtype) * added


def _exact(forward: DecoderForward, outputs: Outputs, wanted: Expected) -> Outputs:
    """What each layer gives in full precision behind stock's layers in 16 bits; empty where that cannot be had."""
    found: Outputs = {module: [] for module in outputs}
    paths = {module: path for path, module in forward.module.named_modules()}

    def forced(twin: nn.Module) -> AbstractContextManager[None]:
        hooks = {module: partial(_note_and_force, found[module], iter(notes)) for module, notes in outputs.items()}
        return listening((twin.get_submodule(paths[module]), hook) for module, hook in hooks.items())

    return {} if wanted.exactly is None or wanted.exactly(forced) is None else found


def _note_and_force(notes: list, forced: Iterator, module: nn.Module, args: tuple, output: Any) -> Any:
    first = output[0] if isinstance(output, tuple) else output
    notes.append(first.clone())
    other = next(forced).to(first.dtype)
    return (other, *output[1:]) if isinstance(output, tuple) else other


@contextmanager
def _following(forward: DecoderForward, outputs: Outputs) -> Iterator[list[Follower]]:
    """Inside, layers pass on what stock's gave."""
    forward.ready(stack=False)
    followers = [Follower(layer, outputs[layer.module], forward.embeddings().dtype) for layer in forward.layers]
    try:
        for one in followers:
            one.layer.bound = one
        yield followers
    finally:
        forward.seen = None  # to be bound anew


@contextmanager
def _noting(forward: DecoderForward) -> Iterator[Outputs]:
    """Inside, notes what each layer gives, call by call."""
    outputs: Outputs = {layer.module: [] for layer in forward.layers}
    with listening((module, partial(_note, notes)) for module, notes in outputs.items()):
        yield outputs


def _note(notes: list[torch.Tensor], module: nn.Module, args: tuple, output: Any) -> None:
    notes.append((output[0] if isinstance(output, tuple) else output).clone())
