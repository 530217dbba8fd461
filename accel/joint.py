"""Linears that read the same tensor, computed together: queries, keys and values; time embeddings; a prompt's keys.

A UNet projects its time embedding in every resnet and its prompt in every cross-attention: dozens of small products,
each a launch that fills a corner of the GPU. The weights are stacked in one storage (no copy, see
`accel.patch.Stacked`), one product gives all outputs, and each module takes its own.
"""

import threading
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from accel.passes import Passes
from accel.patch import Stacked, stack_rows, stacked_rows
from accel.structure import plain

MOST_BYTES = 128 * 2**20  # of weights in one storage: what stacking them needs for a moment on top
MARK = "_accel_joint"  # where a tensor carries the outputs that are still to be taken
KEPT = "_accel_kept"  # where a graph's input carries outputs that stay


class JointLinears:
    """Groups of linears with one input; `of(layer, x)` is that layer's output, alone or taken from its group's.

    The outputs hang on the tensor x itself and each can be taken once, by the thread that made them, within the same
    forward of the whole model, and only while x is unchanged: weights may change between forwards.
    """

    def __init__(self, passes: Passes):
        self.passes = passes
        self.groups: list[list[nn.Linear]] = []

    def add(self, *layers: nn.Linear) -> tuple[Stacked, ...]:
        """Takes layers in; returns the patch that stacks their group, for whoever opened it."""
        size = sum(layer.weight.nbytes for layer in layers)
        for group in self.groups:
            if alike(group[0], layers[0]) and size + sum(layer.weight.nbytes for layer in group) <= MOST_BYTES:
                group += layers
                return ()
        self.groups.append(list(layers))
        return (Stacked(self.groups[-1]),)

    def of(self, layer: nn.Linear, x: torch.Tensor, before: Callable = lambda x: x) -> torch.Tensor:
        """layer(before(x)); `before` must be the same for all layers that are given this x."""
        kept = vars(x).get(KEPT, {}).get(id(layer))
        if kept is not None:
            return kept
        if not self.passes.tracked or x.is_inference():  # an inference tensor does not tell when it changes
            return F.linear(before(x), layer.weight, layer.bias)
        stamp = (x._version, threading.get_ident(), self.passes.number)
        waiting = vars(x).get(MARK)
        if waiting is None or waiting[0] != stamp or id(layer) not in waiting[1]:
            waiting = (stamp, dict(self._outputs(layer, before(x))))
            vars(x)[MARK] = waiting
        output = waiting[1].pop(id(layer), None)
        if not waiting[1]:
            del vars(x)[MARK]
        # A layer on another device or in another dtype than x is torch's to refuse.
        return F.linear(before(x), layer.weight, layer.bias) if output is None else output

    def versions(self) -> int:
        """Grows with every change in place of a weight or bias that autograd counts."""
        return sum(p._version for group in self.groups for layer in group for p in layer.parameters())

    def keep(self, x: torch.Tensor) -> None:
        """Computes every output for x now; `of` gives these, in the same memory, until `keep` is called again."""
        kept = vars(x).setdefault(KEPT, {})
        for group in self.groups:
            members = self._present(group, x)
            if not members:
                continue
            for member, output in zip(members, together(members, x), strict=True):
                if id(member) in kept:
                    kept[id(member)].copy_(output)
                else:
                    kept[id(member)] = output

    def _present(self, group: list[nn.Linear], x: torch.Tensor) -> list[nn.Linear]:
        here = (x.device, x.dtype)  # under offload the others may be elsewhere
        return [m for m in group if plain(m, nn.Linear) is None and (m.weight.device, m.weight.dtype) == here]

    def _outputs(self, layer: nn.Linear, x: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        group = next((group for group in self.groups if any(member is layer for member in group)), [layer])
        members = self._present(group, x)
        return zip(map(id, members), together(members, x) if members else (), strict=True)


def together(
    layers: Sequence[nn.Linear], x: torch.Tensor, stack: bool = True, linear: Callable = F.linear
) -> Sequence[torch.Tensor]:
    """The outputs of plain linears on x: views of one product where their weights lie in one storage.

    stack: put them there if they do not, as after a move to another dtype or device gave each its own storage again.
    """
    stack = stack and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
    weight, bias = (_whole([getattr(layer, name) for layer in layers], stack) for name in ("weight", "bias"))
    if weight is None or (bias is None and any(layer.bias is not None for layer in layers)):
        return [linear(x, layer.weight, layer.bias) for layer in layers]
    return linear(x, weight, bias).split([layer.out_features for layer in layers], dim=-1)


def alike(a: nn.Linear, b: nn.Linear) -> bool:
    """Whether their weights can lie in one storage."""
    return (
        a.in_features == b.in_features
        and (a.bias is None) == (b.bias is None)
        and (a.weight.dtype, a.weight.device) == (b.weight.dtype, b.weight.device)
    )


def _whole(parts: list[torch.Tensor | None], stack: bool) -> torch.Tensor | None:
    if any(part is None for part in parts):
        return None
    whole = stacked_rows(parts)
    if whole is None and stack:
        stack_rows(parts)
        whole = stacked_rows(parts)
    return whole
