"""The output head: the largest matrix of a step, read once; and tables of words that are divided among ranks."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from accel.llm.parts.linear import weights
from accel.llm.parts.step import ForwardContext
from accel.parallel.ranks import chunk_sizes
from accel.parallel.sharded_layers import OUTPUTS, Sharding, local, sharding
from accel.patching.fast_forward import FastForward
from accel.patching.guard import changed_since
from accel.patching.rule import Context, Match, Site


@dataclass(frozen=True)
class OutputHead:
    """The module by which a model makes logits, which its sites share."""

    module: nn.Module


class WeightForward(FastForward):
    """Computes from the weight of a module. sharding: how ranks have divided it; then a call that this one cannot take
    goes to the closure that transformers put in the place of the module's forward.
    """

    def __init__(self, module: nn.Module, *place: Any, sharding: Sharding | None = None) -> None:
        super().__init__(module, *place)
        self.sharding = sharding
        if sharding is not None:
            self.around = vars(module)["forward"]

    def unfit(self, input: Any) -> str | None:
        if type(input) is not torch.Tensor:
            return f"input of type {type(input).__name__}"
        weight: Any = self.module._parameters.get("weight")
        if self.sharding is None and type(weight) is not nn.Parameter:
            return "weights of another kind"
        if self.sharding is not None and (weight is None or weight.device_mesh != self.sharding.mesh):
            return changed_since("how its weight is divided")
        return "weights of another dtype" if input.is_floating_point() and weight.dtype != input.dtype else None


class HeadForward(WeightForward):
    """A linear layer over the last hidden states; of divided words each rank has its rows, and all get all logits."""

    example_rows = (1, 64)

    def example(self, rows: int, like: torch.Tensor) -> tuple | None:
        if self.sharding is not None:
            return None
        return (self.module.weight.detach().new_ones(rows, self.module.in_features),)

    def fast(self, input: torch.Tensor) -> Any:
        module, sharding = self.module, self.sharding
        bias = None if module.bias is None else local(module.bias)
        part = self.kernels.fused_linear(input.contiguous(), local(module.weight), bias)
        if sharding is None:
            return part
        return sharding.ranks.gather(part, chunk_sizes(module.weight.shape[0], sharding.ranks.size))


class StepHeadForward(HeadForward):
    """The same while a step is under way. Outside of one a call is none of many, and the module's own is as fast."""

    def __init__(self, *place: Any, steps: ForwardContext) -> None:
        super().__init__(*place)
        self.steps = steps

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self.steps.current is None:
            return self.stock(*args, **kwargs)
        return super().call(*args, **kwargs)


class TableForward(WeightForward):
    """A table of embeddings whose words are divided among ranks: each looks up its own, and the sum has all."""

    sharding: Sharding

    def unfit(self, input: Any) -> str | None:
        table = self.module
        if table.max_norm is not None or table.scale_grad_by_freq or table.sparse:
            return "a table that changes as it is read"
        return super().unfit(input)

    def fast(self, input: torch.Tensor) -> torch.Tensor:
        words, ranks = local(self.module.weight), self.sharding.ranks
        first = sum(chunk_sizes(self.module.weight.shape[0], ranks.size)[: ranks.rank])
        place = input - first
        elsewhere = (place < 0) | (place >= len(words))
        found = F.embedding(place.masked_fill(elsewhere, 0), words) if len(words) else words.new_zeros(())
        return ranks.reduce(torch.where(elsewhere[..., None], found.new_zeros(()), found))


def match_head(site: Site, context: Context) -> Match | None:
    """The model's own output embeddings, which the rule for the whole model has named, exactly nn.Linear."""
    named = context.find(OutputHead)
    head = None if named is None else named.module
    if head is None or site.module is not head or type(head) is not nn.Linear:
        return None
    found, plain = sharding(head), weights(head)
    whole = plain is not None and not plain.in_blocks
    known = whole if found is None else found.dim == OUTPUTS and found.gathers
    return Match(HeadForward(head, site.path, context.kernels, context.log, sharding=found)) if known else None


def match_table(site: Site, context: Context) -> Match | None:
    """A table of embeddings whose words transformers has divided among ranks."""
    if type(site.module) is not nn.Embedding:
        return None
    found = sharding(site.module)
    if found is None or found.dim != OUTPUTS or found.gathers:
        return None
    return Match(TableForward(site.module, site.path, context.kernels, context.log, sharding=found))
