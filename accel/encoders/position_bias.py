"""Rows of an embedding that are added to scores by how far apart two tokens are, as in T5 and MPNet."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from accel.in_flight import listening
from accel.libraries.attention import lent_attention
from accel.llm.recording.implementation import lent_configs
from accel.llm.recording.inputs import example_ids, most_configured
from accel.llm.recording.record import NotUnderstood
from accel.llm.recording.resting import resting
from accel.patching.fast_forward import FastForward
from accel.patching.structure import plain

LONG = 512  # tokens of the text that shows from which distance on the rows stay the same
LENT = "accel_position_bias"


@dataclass(frozen=True)
class PositionBias:
    """path: of the embedding, from the model. buckets: its rows for keys that are R tokens before a query to R behind.
    most: tokens of the longest text that these are right for; None for any, as what is farther has the last row too.
    """

    path: str
    buckets: tuple[int, ...] = ()
    most: int | None = None

    def bind(self, model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight and the rows of it that are read. Raises NotUnderstood."""
        embedding = model.get_submodule(self.path)
        if (reason := plain(embedding, nn.Embedding)) is not None:
            raise NotUnderstood(f"{self.path}: {reason}")
        weight: Any = embedding.weight
        return weight.detach(), torch.tensor(self.buckets, device=weight.device)


class SeenBias(NamedTuple):
    """A call of an embedding. ids: (queries, keys), which rows it was asked for; values: (queries, keys, heads)."""

    path: str
    ids: torch.Tensor
    values: torch.Tensor

    def is_in(self, bias: object) -> bool:
        """Whether that is (1 or rows, heads, queries, keys) of these values."""
        made = self.values.permute(2, 0, 1)
        return isinstance(bias, torch.Tensor) and bias.shape[1:] == made.shape and bool((bias == made).all())


def listening_to_biases(model: nn.Module, seen: list[SeenBias]) -> Any:
    """Inside, calls of embeddings that are asked for a row for each query and key go into `seen`."""

    def note(path: str) -> Any:
        def hook(_: nn.Module, args: tuple, result: torch.Tensor) -> None:
            if len(args) == 1 and args[0].dim() == 2 and args[0].shape[0] == args[0].shape[1]:
                seen.append(SeenBias(path, args[0].clone(), result.detach().clone()))

        return hook

    found = ((path, one) for path, one in model.named_modules() if type(one) is nn.Embedding)
    return listening([(one, note(path)) for path, one in found])


def long_text(model: Any) -> int:
    """Tokens of a text that shows what a short one does not."""
    return min(LONG, most_configured(model) or LONG)


def learned(model: Any, paths: set[str], call: Callable | None = None) -> dict[str, PositionBias]:
    """By paths of embeddings the biases of long texts. Raises NotUnderstood where one hangs on more than distances.

    call: of the ids of one, (1, L), the keywords of a call of the model.
    """
    longest = long_text(model)
    seen: list[SeenBias] = []

    def attend(_: nn.Module, query: torch.Tensor, *__: Any, **___: Any) -> tuple:
        return query.transpose(1, 2).contiguous(), None

    with resting(model), lent_attention(LENT, attend, lambda *_, **__: None), ExitStack() as inside:
        inside.enter_context(lent_configs(model, lambda _: LENT))
        inside.enter_context(listening_to_biases(model, seen))
        ids = example_ids(model, longest)[:1]
        type(model).forward(model, **({"input_ids": ids} if call is None else call(ids)))
    found = {one.path: one for one in seen if one.path in paths and len(one.ids) == longest}
    if found.keys() != paths:
        raise NotUnderstood("its position bias is of another kind in long texts")
    return {path: by_distance(path, one.ids.cpu()) for path, one in found.items()}


def by_distance(path: str, ids: torch.Tensor) -> PositionBias:
    """The bias whose rows for (queries, keys) are these."""
    length = len(ids)
    line = torch.cat([ids[1:, 0].flip(0), ids[0]])  # of keys length - 1 before a query to as many behind
    at = torch.arange(length, device=ids.device)
    if not torch.equal(ids, line[at - at[:, None] + length - 1]):
        raise NotUnderstood("its position bias hangs on more than how far apart tokens are")
    before, behind = line[: length - 1].flip(0), line[length:]
    changes = (before != before[-1]) | (behind != behind[-1])
    reach = int(changes.nonzero().max()) + 2 if bool(changes.any()) else 1
    if reach > length // 2:
        return PositionBias(path, tuple(line.tolist()), length)
    return PositionBias(path, tuple(line[length - 1 - reach : length + reach].tolist()))


class PositionBiasForward(FastForward):
    """An embedding of biases. While its encoder runs on packed tokens nobody reads the (L, L) biases: they get no
    memory.
    """

    steps: Any
    beneath = True

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return (self.stock if self.steps.current is None else self.fast)(*args, **kwargs)

    def fast(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.empty(*ids.shape, self.module.embedding_dim, device="meta", dtype=self.module.weight.dtype)
