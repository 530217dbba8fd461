"""Linears that read the same tensor, computed together: queries, keys and values; time embeddings; a prompt's keys.

A UNet projects its time embedding in every resnet and its prompt in every cross-attention: dozens of small products,
each a launch that uses a part of the GPU. The weights are stacked in one storage without a copy, see `Stacked`. One
product gives all outputs, and each module takes its own.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from accel.fusion.loop import ForwardCounter
from accel.fusion.tensor_notes import TensorNotes
from accel.parallel.sharded_layers import local
from accel.patching.rule import Context, unshare
from accel.quantization.adapters import low_rank, read_low_rank, with_adapters
from accel.quantization.module import row_tensors
from accel.quantization.product import (
    Rows,
    adapted_product,
    base,
    device_and_dtype,
    joint_term,
    keeps_forward,
    multiplied,
    order_of,
    plain_linear,
    product,
    rounds,
)


class Stacked:
    """Puts the weights of several linears into one storage, each a view of its rows, so that one GEMM serves all.

    No new parameters, no second copy: `stacked_rows` finds the whole again from the parts. Undo gives each its own
    storage.
    """

    def __init__(self, linears: Sequence[nn.Linear]):
        self.linears = linears  # the caller's list, which may still grow before the patch is applied

    def apply(self) -> None:
        bases = list(map(base, self.linears))
        if len({type(linear) for linear in bases}) == 1:
            *parts, biases = zip(*map(row_tensors, bases), strict=True)
            for own in parts:
                stack_rows(own)
            stack_rows(biases, [weight.shape[0] for weight in parts[0] if weight is not None])  # a rank's own rows

    def check(self) -> None:
        """Nothing to conflict with: values and shapes are the user's own."""

    def undo(self) -> None:
        for linear in map(base, self.linears):
            for tensor in (*linear.parameters(), *linear.buffers()):  # by other names where it was pruned since
                unshare(local(tensor))


def stacked_rows(parts: Sequence[torch.Tensor | None], sizes: Sequence[int] | None = None) -> torch.Tensor | None:
    """The tensor whose consecutive rows the parts are, or None where they do not lie one after the other.

    sizes: rows of each; then some may be missing, and there are zeros in their places. Waits for these on a GPU.
    """
    first = parts[0]
    if first is None or (sizes is None and any(part is None for part in parts)):
        return None
    place = first.data_ptr()
    row, storage = first[:1].nbytes, first.untyped_storage()
    sizes = [part.shape[0] for part in parts if part is not None] if sizes is None else sizes
    for part, size in zip(parts, sizes, strict=True):
        if part is not None:
            if part.data_ptr() != place or part.dtype != first.dtype or not part.is_contiguous():
                return None
            if part.untyped_storage().data_ptr() != storage.data_ptr():
                return None
        place += size * row
    if place > storage.data_ptr() + storage.nbytes():
        return None
    whole = first.detach().as_strided((sum(sizes), *first.shape[1:]), first.stride())
    missing = (one for part, one in zip(parts, whole.split(list(sizes)), strict=True) if part is None)
    return None if any(bool(one.any()) for one in missing) else whole


def stack_rows(parts: Sequence[torch.Tensor | None], sizes: Sequence[int] | None = None) -> None:
    """Moves the parts into one storage, in place, where all are there and match. sizes: as of `stacked_rows`."""
    held = [part for part in parts if part is not None and not part.is_meta]
    if parts[0] is None or (len(held) < len(parts) and (sizes is None or any(one.is_meta for one in held))):
        return
    if stacked_rows(parts, sizes) is not None:
        return
    if any(part.is_inference() for part in held):  # their place in memory cannot be changed
        return
    if len({id(part) for part in held}) != len(held):  # tied weights cannot be two rows of one storage
        return
    if len({(part.dtype, part.device, part.shape[1:]) for part in held}) != 1:
        return
    sizes = [part.shape[0] for part in held] if sizes is None else list(sizes)
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat(
            [
                held[0].new_zeros(size, *held[0].shape[1:]) if part is None else part.detach()
                for part, size in zip(parts, sizes, strict=True)
            ]
        )
        for part, rows in zip(parts, whole.split(sizes), strict=True):
            if part is not None:
                part.data = rows


Self = TypeVar("Self", bound="StackedLinears")
MOST_BYTES = 128 * 2**20  # of weights in one storage: what stacking them needs for a moment on top


class StackedLinears:
    """Groups of linears with one input; `of(layer, x)` is that layer's output, from its group's product where it has
    one.

    Outputs are kept on the tensor x. Each can be taken once, by the thread that made it, within the same forward of the
    model, while x is unchanged. Weights may change between forwards.
    """

    def __init__(self, passes: ForwardCounter):
        self.passes = passes
        self.groups: list[list[nn.Linear]] = []

    @classmethod
    def shared(cls: type[Self], context: Context) -> Self:
        """The one of this class that all sites of the model share."""
        return context.of(cls, lambda: cls(context.of(ForwardCounter)))

    def add(self, *layers: nn.Linear) -> tuple[Stacked, ...]:
        """Takes layers in; returns the patch that stacks their group, where this call began it."""
        size = sum(map(_bytes, layers))
        for group in self.groups:
            if can_stack(group[0], layers[0]) and size + sum(map(_bytes, group)) <= MOST_BYTES:
                group += layers
                return ()
        self.groups.append(list(layers))
        return (Stacked(self.groups[-1]),)

    def of(self, layer: nn.Linear, x: torch.Tensor, before: Callable = lambda x: x) -> torch.Tensor:
        """layer(before(x)); `before` must be the same for all layers that are given this x."""
        notes = TensorNotes.on(x)
        if notes is not None and notes.kept is not None and (kept := notes.kept.get(id(layer))) is not None:
            return kept
        passes = self.passes
        if not passes.tracked or passes.apart or x.is_inference():  # an inference tensor does not tell when it changes
            return product(layer, before(x))
        notes, taker = TensorNotes.begin(x), (threading.get_ident(), passes.number)
        outputs = notes.outputs
        if outputs is None or notes.taker != taker or id(layer) not in outputs:
            outputs = dict(self._outputs(layer, before(x)))
            notes.taker, notes.outputs = taker, outputs
        output = outputs.pop(id(layer), None)
        if not outputs:
            notes.outputs = None
        # A layer on another device or in another dtype than x is torch's to refuse.
        return product(layer, before(x)) if output is None else output

    def versions(self) -> int | None:
        """A sum that grows with each in-place change of a weight or bias; None where autograd counts not all."""
        found = (tensor for group in self.groups for layer in group for tensor in row_tensors(base(layer)))
        held = [tensor for tensor in found if tensor is not None]
        return None if any(map(torch.Tensor.is_inference, held)) else sum(tensor._version for tensor in held)

    def keep(self, x: torch.Tensor) -> None:
        """Computes every output for x now. `of` returns these, in the same memory, until `keep` is called again."""
        kept = TensorNotes.keep(x)
        for group in self.groups:
            members = self._present(group, x)
            if not members:
                continue
            for member, output in zip(members, project_together(members, x), strict=True):
                if id(member) in kept:
                    kept[id(member)].copy_(output)
                else:
                    kept[id(member)] = output

    def _present(self, group: list[nn.Linear], x: torch.Tensor) -> list[nn.Linear]:
        here = (x.device, x.dtype)  # under offload the others may be elsewhere
        return [m for m in group if _known(m, x.dtype) and device_and_dtype(base(m)) == here]

    def _outputs(self, layer: nn.Linear, x: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        group = next((group for group in self.groups if any(member is layer for member in group)), [layer])
        members = self._present(group, x)
        return zip(map(id, members), project_together(members, x) if members else (), strict=True)


def _known(layer: Any, dtype: torch.dtype) -> bool:
    """Whether it computes a product, and what adapters of low rank add to it."""
    inner = base(layer)
    return plain_linear(inner) is None and (inner is layer or read_low_rank(layer, dtype) is not None)


class TimeProjections(StackedLinears):
    """Of the time embedding, in all resnets of a model."""


class PromptProjections(StackedLinears):
    """Keys' and values' of the prompt, in all cross-attentions of a model."""


def project_together(
    layers: Sequence[nn.Linear], x: torch.Tensor | Rows, stack: bool = True, linear: Callable = F.linear
) -> Sequence[torch.Tensor]:
    """The outputs of linears on x: views of one product where their weights lie in one storage; adapters are added.

    stack: put them there if they do not, as after a move to another dtype or device gave each its own storage again.
    """
    rows = x if isinstance(x, Rows) else Rows(x)
    stack = stack and not (rows.x.is_cuda and torch.cuda.is_current_stream_capturing())
    bases = [base(layer) for layer in layers]
    if any(map(keeps_forward, layers)) and (term := joint_term(layers, rows.x)) is not None:
        if (whole := stacked_tensors(bases, stack)) is not None:
            return adapted_product(rows.normed(), whole, term, linear).split(
                [one.out_features for one in bases], dim=-1
            )
    found = [low_rank(layer, rows.x) if keeps_forward(layer) else () for layer in layers]
    adapters = [own for own in found if own is not None]
    kinds = {(type(layer), order_of(layer), rounds(layer, rows.x) and layer.rounding) for layer in bases}
    together = len(kinds) == 1 and len(adapters) == len(layers) and not any(map(keeps_forward, bases))
    whole = stacked_tensors(bases, stack) if together else None
    if whole is None:
        return [product(layer, rows, multiply=linear) for layer in layers]
    outputs = multiplied(bases[0], whole, rows, linear).split([layer.out_features for layer in bases], dim=-1)
    return with_adapters(rows.normed(), outputs, adapters) if any(adapters) else outputs


def can_stack(a: nn.Linear, b: nn.Linear, biases: bool = True) -> bool:
    """Whether their weights can lie in one storage. biases: both must have one, or none."""

    def kinds(linear: nn.Linear) -> list:
        tensors = row_tensors(linear)
        return [None if t is None else (t.dtype, t.device, t.shape[1:]) for t in (tensors if biases else tensors[:-1])]

    a, b = base(a), base(b)
    return type(a) is type(b) and device_and_dtype(a) == device_and_dtype(b) and kinds(a) == kinds(b)


def _bytes(linear: nn.Linear) -> int:
    """Of its weight where it is multiplied, written out if it is quantized."""
    return linear.in_features * linear.out_features * device_and_dtype(base(linear))[1].itemsize


def stacked_tensors(layers: Sequence[nn.Linear], stack: bool, fill: bool = False) -> list[Any] | None:
    """The tensors of `row_tensors`, of all layers as one; None where they lie apart. stack: put them together first.

    fill: with zeros for biases that some but the first have not, see `stacked_rows`.
    """
    every = [*zip(*map(row_tensors, layers), strict=True)]
    mixed = None in every[-1] and any(one is not None for one in every[-1])
    if mixed and not (fill and every[-1][0] is not None):
        return None
    wholes = []
    for parts in every:
        sizes = [weight.shape[0] for weight in every[0]] if mixed and parts is every[-1] else None
        whole = None if all(part is None for part in parts) else _whole(parts, stack, sizes)
        if whole is None and any(part is not None for part in parts):
            return None
        wholes.append(whole)
    return wholes


def _whole(parts: Sequence[torch.Tensor | None], stack: bool, sizes: Sequence[int] | None) -> torch.Tensor | None:
    whole = stacked_rows(parts, sizes)
    if whole is None and stack:
        stack_rows(parts, sizes)
        whole = stacked_rows(parts, sizes)
    return whole
