"""Attention that a model's own code computes: seen in the products and softmaxes of a recorded run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from accel.comparison import agree, factor
from accel.encoders.position_bias import SeenBias
from accel.encoders.relative import Relative, seen_relative
from accel.llm.recording.record import Attended, LayerRecord, Stored

PRODUCTS = {torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.bmm, torch.Tensor.__matmul__, torch.einsum}
SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
SOFTMAXES = {torch.softmax, F.softmax, torch.Tensor.softmax}


class Product(NamedTuple):
    """module: in whose forward it was."""

    module: nn.Module
    left: torch.Tensor
    right: torch.Tensor
    made: torch.Tensor


@dataclass
class OwnAttended(Attended):
    """bias: the path of the embedding whose rows are added to its scores; "" for none. relative: more that is. mask:
    true where scores are hidden, (rows, 1, queries, keys).
    """

    bias: str = ""
    relative: Relative | None = None


class OwnCode(TorchFunctionMode):
    """Sees what is multiplied. where: gives the module whose forward runs; None outside of layers."""

    def __init__(self, where: Callable[[], nn.Module | None]):
        super().__init__()
        self.where = where
        self.forget()

    def forget(self) -> None:
        self.products: list[Product] = []
        self.attended: list[tuple[nn.Module, dict[str, Any], torch.Tensor]] = []
        self.softmaxes: list[
            tuple[nn.Module | None, torch.Tensor, torch.Tensor]
        ] = []  # behind a product of which module
        self.gathered: list[tuple[torch.Tensor, torch.Tensor, Any]] = []  # made, index, the product it is of

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention and (module := self.where()) is not None:
            self.attended.append((module, dict(zip(SDPA, args, strict=False)) | (kwargs or {}), made))
        if (func in PRODUCTS or func in SOFTMAXES or func is torch.gather) and (module := self.where()) is not None:
            if func in SOFTMAXES and args:
                self.softmaxes.append((self.products[-1].module if self.products else None, args[0], made))
            elif func is torch.gather:
                source, index = args[0], (kwargs or {}).get("index", args[-1])
                of = next((one for one in self.products if one.made is source), None)
                self.gathered += [(made, index, of)] if of is not None and index.dim() == 3 else []
            elif len(args) == 2 + (func is torch.einsum) and args[-2].shape[-1] == args[-1].shape[-2]:
                self.products.append(Product(module, args[-2], args[-1], made))
        return made

    def by_module(self) -> Iterator["OwnCode"]:
        """What each module has computed that attends, in their order."""
        for module in dict.fromkeys(module for module, _, _ in self.softmaxes):
            part = OwnCode(self.where)
            part.products = [one for one in self.products if one.module is module]
            part.softmaxes = [one for one in self.softmaxes if one[0] is module]
            yield part

    def attention(
        self, layer: LayerRecord, index: int, biases: Sequence[SeenBias]
    ) -> tuple[OwnAttended, Stored] | None:
        """The one attention of what was seen since `forget`; None for none, several, or another formula.

        index: of the layer. biases: see `EncoderRecord`.
        """
        rows = layer.call.input.held.shape[0]

        def by_heads(t: torch.Tensor) -> torch.Tensor:
            return t.unflatten(0, (rows, -1)) if t.dim() == 3 else t

        def shown(t: torch.Tensor) -> torch.Tensor:
            return t if hidden is None else t.masked_fill(hidden, 0.0)

        def attended(made: Product, key: torch.Tensor, scale: float, **more: Any) -> tuple[OwnAttended, Stored]:
            query, value, output = map(by_heads, (made.left, after[0].right, after[0].made))
            found = OwnAttended(query.clone(), hidden, {"scaling": scale}, output.transpose(1, 2).clone(), **more)
            return found, Stored(made.module, index, key.contiguous().clone(), value.contiguous().clone())

        if len(self.attended) == 1 and not self.softmaxes:
            ((module, given, output),) = self.attended
            q, k, v = (given[name] for name in SDPA[:3])
            if q.dim() != 4 or given.get("attn_mask") is not None or given.get("is_causal"):
                return None
            found = OwnAttended(
                q.clone(), None, {"scaling": given.get("scale") or q.shape[-1] ** -0.5}, output.transpose(1, 2)
            )
            return found, Stored(module, index, k.clone(), v.clone())
        if len(self.softmaxes) != 1 or self.attended:
            return None
        ((_, scores, shares),) = self.softmaxes
        after = [one for one in self.products if one.left.numel() == shares.numel()]
        after = [one for one in after if torch.equal(one.left.reshape(shares.shape), shares)]
        after = [one for one in after if torch.equal(one.left @ one.right, one.made)]
        if len(after) != 1 or any(one.dim() not in (3, 4) or one.shape[0] % rows for one in (scores, after[0].made)):
            return None
        alike = [one for one in self.products if one.made.shape[-2:] == scores.shape[-2:]]
        before = [one for one in alike if one.made.numel() == scores.numel() and one.left is not after[0].left]
        scores = by_heads(scores)
        away = scores < torch.finfo(scores.dtype).min / 2
        hidden = away[:, :1] if bool(away.any()) and torch.equal(away, away[:, :1].expand_as(away)) else None
        scores = shown(scores)
        for made in before:
            plain, usual = shown(by_heads(made.left @ made.right)), made.left.shape[-1] ** -0.5
            added = [("", plain.new_zeros(())), *((one.path, one.values.permute(2, 0, 1)) for one in biases)]
            added = [(path, one) for path, one in added if one.shape in ((), plain.shape[1:])]
            for scale, (path, one) in product((1.0, usual, factor(plain, scores)), added):
                if not agree(shown(scale * plain + one), scores):
                    continue
                return attended(made, by_heads(made.right.transpose(-1, -2)), scale, bias=path)
            if (other := seen_relative(layer, by_heads(made.left), scores, self.gathered)) is not None:
                return attended(made, other.key, other.scale, relative=other.spec)
        return None
