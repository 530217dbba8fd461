"""Attention that a model's own code computes: what becomes of the products of a recorded run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from accel.encoders.position_bias import SeenBias
from accel.encoders.relative import Relative, seen_relative
from accel.encoders.waiting_scores import PRODUCTS, FusedProducts, Seen, WaitingScores
from accel.llm.recording.record import Attended, LayerRecord, Stored

PLAIN = (torch.Tensor, nn.Parameter)
SUMS = {torch.add, torch.Tensor.add, torch.Tensor.__add__}
SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@dataclass
class OwnAttended(Attended):
    """bias: the path of the embedding whose rows are added to its scores; "" for none. relative: more that is; factors:
    by what its products with queries and with keys are multiplied. mask: true where scores are hidden, (rows, 1,
    queries, keys). added: names of parameters that are added to queries and values.
    """

    bias: str = ""
    relative: Relative | None = None
    factors: tuple[float, float] | None = None
    added: tuple[str, ...] = ()


class OwnCode(FusedProducts):
    """Sees what is multiplied. where: gives the module whose forward runs; None outside of layers."""

    patient = True

    def __init__(self, where: Callable[[], nn.Module | None]):
        super().__init__(where)
        self.where = where

    def forget(self) -> None:
        super().forget()
        self.attended: list[tuple[nn.Module, dict[str, Any], torch.Tensor]] = []
        self.gathered: list[tuple[torch.Tensor, torch.Tensor, Any]] = []  # made, index, the product it is of
        self.sums: list[tuple[torch.Tensor, tuple]] = []  # made, of what

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if (module := self.where()) is None or func is F.multi_head_attention_forward:
            return func(*args, **(kwargs or {}))
        factors = len(args) == 2 and all(isinstance(one, torch.Tensor) for one in args)  # of einsum a text comes first
        if func in PRODUCTS and factors and args[0].dim() == args[1].dim() > 3 and len(args[1]) == 1:
            args = args[0], args[1].expand(len(args[0]), *args[1].shape[1:])
        made = super().__torch_function__(func, types, args, kwargs)
        if func in SUMS and type(made) is torch.Tensor:
            self.sums.append((made, args))
        if func is F.scaled_dot_product_attention:
            self.attended.append((module, dict(zip(SDPA, args, strict=False)) | (kwargs or {}), made))
        elif func is torch.gather and isinstance(args[0], WaitingScores):
            index = (kwargs or {}).get("index", args[-1])
            self.gathered += [(made.flatten(0, -3), index.flatten(0, -3), args[0])] if index.dim() > 2 else []
        return made

    def by_module(self) -> Iterator["OwnCode"]:
        """What each module has computed that attends, in their order."""
        for module in dict.fromkeys(one.ended for one in self.seen):
            part = OwnCode(self.where)
            part.seen = [one for one in self.seen if one.ended is module]
            yield part

    def attention(
        self, layer: LayerRecord, index: int, biases: Sequence[SeenBias] | None
    ) -> tuple[OwnAttended, Stored] | None:
        """The one attention of what was seen since `forget`; None for none, several, or another formula.

        index: of the layer. biases: see `EncoderRecord`; None where what is added to scores is not looked at.
        """
        if len(self.attended) == 1 and not self.seen:
            ((module, given, output),) = self.attended
            q, k, v = (given[name] for name in SDPA[:3])
            if q.dim() != 4 or given.get("attn_mask") is not None or given.get("is_causal"):
                return None
            found = OwnAttended(
                q.clone(), None, {"scaling": given.get("scale") or q.shape[-1] ** -0.5}, output.transpose(1, 2)
            )
            return found, Stored(module, index, k.clone(), v.clone())
        if len(self.seen) != 1 or self.attended or self.left:
            return None
        return _attention(self, self.seen[0], layer, index, biases)

    def added(self, module: nn.Module, value: torch.Tensor) -> tuple[str, ...]:
        """The names of a module's parameters that are added to queries and to this; none if there are not two."""
        places = {one.data_ptr(): name for name, one in module._parameters.items() if one is not None}
        terms = ((made, places.get(one.data_ptr())) for made, given in self.sums for one in given if type(one) in PLAIN)
        found = {name: made.data_ptr() == value.data_ptr() for made, name in terms if name is not None}
        return tuple(sorted(found, key=found.__getitem__)) if sorted(found.values()) == [False, True] else ()


def _attention(
    watched: OwnCode, seen: Seen, layer: LayerRecord, index: int, biases: Sequence[SeenBias] | None
) -> tuple[OwnAttended, Stored] | None:
    """See `OwnCode.attention`."""
    rows, scores = layer.call.input.held.shape[0], seen.scores
    if len(scores.base) not in (3, 4) or scores.base[0] % rows:
        return None

    def by_heads(t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(0, (rows, -1)) if t.dim() == 3 else t

    query, key, value, output = map(by_heads, (scores.left, scores.right.mT, seen.value, seen.output))
    added = None if biases is None else scores.added(query.shape[:2])
    added = query.new_zeros(1, 1, query.shape[2], key.shape[2]) if added is None else added
    away = added < torch.finfo(added.dtype).min / 2
    hidden = away[:, :1] if bool(away.any()) else None
    if hidden is not None and not torch.equal(away, hidden.expand_as(away)):
        return None
    shown, bias, scale, relative, factors = added.masked_fill(away, 0.0), "", scores.scale, None, None
    if bool(shown.any()):
        alike = [one.path for one in biases or () if one.values.shape[:2] == shown.shape[2:] and one.is_in(shown)]
        bias = next(iter(alike), "")
    if bool(shown.any()) and not bias:
        whole = scale * (query @ key.mT) + shown
        if (other := seen_relative(layer, query, whole, watched.gathered)) is None:
            return None
        relative, key, scale, factors = other
    found = OwnAttended(
        query.clone(), hidden, {"scaling": scale}, output.transpose(1, 2).clone(), bias=bias, relative=relative,
        factors=factors, added=watched.added(seen.ended, seen.value),
    )  # fmt: skip
    return found, Stored(seen.ended, index, key.contiguous().clone(), value.contiguous().clone())


def hides_all_from_some(model: nn.Module, call: dict[str, Any]) -> bool:
    """Whether some queries see no key by the mask of an attention, to which then all are alike."""
    with OwnCode(lambda: model) as watched:
        type(model).forward(model, **call)
    terms = (term for one in watched.seen if one.scores is not None for _, term in one.scores.terms)
    return any(bool((term < torch.finfo(term.dtype).min / 2).all(-1).any()) for term in terms)
