"""The output head: the largest matrix of a step, read once; and tables of words that are divided among ranks."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from accel.llm.runtime.linear import weights
from accel.parallel.ranks import chunk_sizes
from accel.parallel.sharded_layers import OUTPUTS, Sharding, local, sharding
from accel.patching.fallback_log import FallbackLog
from accel.patching.fast_forward import FastForward, Kernels
from accel.patching.guard import changed_since
from accel.patching.rule import Context, Match, Site


class ShardedForward(FastForward):
    """Computes from this rank's part of a weight. What it cannot take goes to the closure that transformers put there,
    which was the module's forward before.
    """

    def __init__(self, module: nn.Module, path: str, kernels: Kernels, log: FallbackLog, found: Sharding) -> None:
        super().__init__(module, path, kernels, log)
        self.sharding, self.around = found, vars(module)["forward"]

    def unfit(self, input: Any) -> str | None:
        if type(input) is not torch.Tensor:
            return f"input of type {type(input).__name__}"
        weight = self.module._parameters.get("weight")
        if weight is None or weight.device_mesh != self.sharding.mesh:
            return changed_since("how its weight is divided")
        if input.is_floating_point() and weight.dtype != input.dtype:
            return "weights of another dtype"
        return None


@dataclass(frozen=True)
class OutputHead:
    """The module by which a model makes logits, which its sites share."""

    module: nn.Module


class HeadForward(FastForward):
    """A linear layer over the last hidden states."""

    example_rows = (1, 64)

    def unfit(self, input: Any) -> str | None:
        if type(input) is not torch.Tensor:
            return f"input of type {type(input).__name__}"
        weight = self.module.weight
        if type(weight) is not nn.Parameter or weight.dtype != input.dtype:
            return "weights of another kind or dtype"
        return None

    def example(self, rows: int, like: torch.Tensor) -> tuple:
        return (self.module.weight.detach().new_ones(rows, self.module.in_features),)

    def fast(self, input: torch.Tensor) -> Any:
        return self.kernels.fused_linear(input.contiguous(), self.module.weight, self.module.bias)


class ShardedHeadForward(ShardedForward):
    """The same of a head whose words are divided among ranks: each multiplies its rows, and all get all logits."""

    def fast(self, input: torch.Tensor) -> torch.Tensor:
        module, ranks = self.module, self.sharding.ranks
        bias = None if module.bias is None else local(module.bias)
        part = self.kernels.fused_linear(input.contiguous(), local(module.weight), bias)
        return ranks.gather(part, chunk_sizes(module.weight.shape[0], ranks.size))


class TableForward(ShardedForward):
    """A table of embeddings whose words are divided among ranks: each looks up its own, and the sum has all."""

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
    found = sharding(head)
    if found is not None and found.dim == OUTPUTS and found.gathers:
        return Match(ShardedHeadForward(head, site.path, context.kernels, context.log, found))
    if found is not None or weights(head) is None:
        return None
    return Match(HeadForward(site.module, site.path, context.kernels, context.log))


def match_table(site: Site, context: Context) -> Match | None:
    """A table of embeddings whose words transformers has divided among ranks."""
    if type(site.module) is not nn.Embedding:
        return None
    found = sharding(site.module)
    if found is None or found.dim != OUTPUTS or found.gathers:
        return None
    return Match(TableForward(site.module, site.path, context.kernels, context.log, found))
