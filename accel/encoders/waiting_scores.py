"""Attention that a model's own code computes, without its scores in memory: products of queries and keys wait until it
is known that a softmax, and then a product with values, is all they are for.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from accel.errors import Unfit

PRODUCTS = {torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.bmm, torch.Tensor.__matmul__, torch.einsum}
WATCHED = {*PRODUCTS, F.multi_head_attention_forward}
SOFTMAXES = {torch.softmax, F.softmax, torch.Tensor.softmax}
FACTS = {"shape", "dtype", "device", "ndim", "is_cuda", "requires_grad", "size", "dim", "numel", "__len__"}
SUMS = {"add": 1, "iadd": 1, "radd": 1, "sub": -1, "isub": -1}
INPLACE = {"__setitem__", *(f"__i{one}__" for one in ("add", "sub", "mul", "truediv", "div", "pow", "and", "or"))}
VIEWS = {"view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as"}
CASTS = {"float": torch.float32, **dict.fromkeys(("to", "type", "type_as"))}


class WaitingScores(torch.Tensor):
    """Scores, or shares that a softmax made of them, which are computed where anything but an attention needs them.

    left, right: (..., L, D) and (..., D, K), whose product times scale and with terms waits. terms: shapes but for
    (L, K), and what is added to scores so grouped. shares: of a softmax. made: it, computed. form, kind: its shape and
    dtype. viewed: a change of it in place would show in another. source: in which it was begun.
    """

    left: torch.Tensor
    right: torch.Tensor
    scale: float
    terms: tuple[tuple[torch.Size, torch.Tensor], ...]
    shares: bool
    made: torch.Tensor | None
    form: torch.Size
    kind: torch.dtype
    viewed: bool
    source: "FusedProducts"

    @staticmethod
    def of(form: torch.Size, kind: torch.dtype, held: dict[str, Any]) -> "WaitingScores":
        make: Any = torch.Tensor._make_wrapper_subclass
        one = make(WaitingScores, form, dtype=kind, device=held["left"].device)
        one.__dict__ |= {"viewed": False} | held | {"made": None, "form": form, "kind": kind}
        return one

    def but(self, form: Any = None, kind: torch.dtype | None = None, **changed: Any) -> "WaitingScores":
        """It, with these instead."""
        return self.of(form or self.form, kind or self.kind, vars(self) | {"viewed": False} | changed)

    def seen_as(self, form: Any = None, kind: torch.dtype | None = None) -> "WaitingScores":
        """What may lie in the same memory."""
        self.viewed = True
        return self.but(form, kind, viewed=True)

    @property
    def base(self) -> torch.Size:
        return torch.Size((*self.left.shape[:-1], self.right.shape[-1]))

    def computed(self) -> torch.Tensor:
        if self.made is None:
            self.source.check(self)
            made = self.left @ self.right * self.scale
            for lead, term in self.terms:
                made = made.reshape(*lead, *self.base[-2:]) + term
            made = made.softmax(-1) if self.shares else made
            self.made = made.reshape(self.form).to(self.kind)
        return self.made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        if (func.__self__.__name__ if name == "__get__" else name) in FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name, inplace = name.strip("_"), name in INPLACE or (name.endswith("_") and not name.endswith("__"))
        if name in ("add", "radd", "mul", "rmul") and len(args) == 2 and not (kwargs or isinstance(args[0], cls)):
            args = args[::-1]
        first, one, *rest = args if func in (torch.einsum, torch.where) and len(args) == 3 else ("", *(args or (None,)))
        if isinstance(one, cls) and (one.made is None or one.source.patient):
            found = one.waiting(func, name, rest, kwargs, first)
            if found is not None and not inplace:
                return found
            if found is not None and not one.viewed and (found.form, found.kind) == (one.form, one.kind):
                vars(one).update(vars(found))
                return one
        if inplace and isinstance(one, cls):
            if one.viewed:
                raise Unfit("scores are changed in place that are seen elsewhere")
            one.source = FusedProducts()  # its numbers are more than what waits
        if name == "expand_as" and not isinstance(one, cls):
            return one.expand(args[1].shape)
        return func(*all_computed(args), **all_computed(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*all_computed(args), **all_computed(kwargs or {}))

    def waiting(self, func: Any, name: str, args: list, kwargs: dict, first: Any) -> Any:
        """What a function of it and these gives; None where that takes its numbers. first: what came before it."""
        if func is torch.where:
            return self.hidden(~first, *args) if isinstance(first, torch.Tensor) else None
        if func is F.dropout:
            given = {"p": 0.5, "training": True} | dict(zip(("p", "training"), args, strict=False)) | kwargs
            return None if given["p"] and given["training"] else self
        if func in PRODUCTS:
            return self.attended(args[0], first) if self.shares and len(args) == 1 else None
        if func in SOFTMAXES:
            dim = args[0] if args else kwargs.get("dim")
            fits = not self.shares and dim in (-1, len(self.form) - 1) and self.form[-1] == self.base[-1]
            return self.but(kind=kwargs.get("dtype"), shares=True) if fits else None
        if name in VIEWS or name in ("contiguous", "clone"):
            return self.seen_as(func(torch.empty(self.form, device="meta"), *args, **kwargs).shape)
        if name in CASTS:
            like = args[0] if args else kwargs.get("dtype", CASTS.get(name))
            dtype: Any = like.dtype if isinstance(like, torch.Tensor) and like.device == self.left.device else like
            fits = isinstance(dtype, torch.dtype) and len(args) + len(kwargs) < 2
            return self.seen_as(kind=dtype) if fits and torch.promote_types(dtype, self.left.dtype) == dtype else None
        if name == "masked_fill" and len(args) == 2:
            return self.hidden(*args)
        if self.shares or kwargs or len(args) != 1:
            return None
        if name in ("mul", "imul", "rmul"):
            return self.times(args[0])
        if name in ("div", "truediv", "itruediv", "idiv"):
            return self.times(1 / args[0])
        return self.plus(args[0] if SUMS[name] == 1 else -args[0]) if name in SUMS else None

    def plus(self, term: Any) -> "WaitingScores | None":
        """With a tensor added."""
        term, shape = all_computed(term), self.form
        if isinstance(term, int | float) and not term:
            return self.but()
        if not isinstance(term, torch.Tensor) or not term.is_floating_point() or not _fits(term, shape):
            return None
        dtype = torch.promote_types(term.dtype, self.kind) if term.dim() else self.kind
        term = term[(None,) * (len(shape) - term.dim())]
        if shape[-2:] != self.base[-2:]:
            term, shape = term.expand(shape).reshape(self.base), self.base
        return self.but(kind=dtype, terms=(*self.terms, (shape[:-2], term)))

    def hidden(self, mask: Any, value: Any) -> "WaitingScores | None":
        """With a value in the place of those that a mask shows, which is so low that it may as well be added."""
        if self.source.patient and not bool(mask.any()):
            return self.but()
        value = float(value) if self.source.patient else value
        low = isinstance(value, float) and value < torch.finfo(self.kind).min / 2
        if not low or self.shares or not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
            return None
        # Kernels multiply by log2(e), and give no numbers for queries that see nothing but what then is infinite.
        least = value if self.source.patient else max(value, torch.finfo(torch.float32).min / 4)
        return self.plus(torch.zeros_like(mask, dtype=self.kind).masked_fill(mask, least))

    def times(self, factor: Any) -> "WaitingScores | None":
        """Times a number, or a tensor that is one for each query."""
        if isinstance(factor, int | float):
            terms = tuple((lead, term * factor) for lead, term in self.terms)
            return self.but(scale=self.scale * factor, terms=terms)
        if not isinstance(factor, torch.Tensor) or self.terms or self.form != self.base:
            return None
        if not _fits(factor, (*self.base[:-1], 1)) or torch.result_type(self.left, factor) != self.kind:
            return None
        return self.but(left=self.left * factor)

    def attended(self, value: Any, equation: str) -> torch.Tensor | None:
        """The product of shares and values, (..., K, D), or that of an equation."""
        value, back, base, lead = all_computed(value), None, self.base, self.form[:-2]
        if equation:
            order = as_product(equation, self, value)
            if order is None or list(order[0]) != sorted(order[0]):
                return None
            value, back = value.permute(order[1]), order[2]
        if self.form[-2:] != base[-2:] or value.shape[:-1] != (*lead, base[-1]):
            return None
        if not self.left.dtype == self.right.dtype == value.dtype == self.kind:
            return None
        group = max((one for one, term in self.terms if term.shape[:-2].numel() > 1), key=len, default=lead)
        mask = self.added(group)
        if mask is not None:
            mask = mask.clamp(min=torch.finfo(value.dtype).min) if mask.dtype != value.dtype else mask
            if len(group) > 2 and mask.shape[:-2].numel() > 1:
                mask = mask.expand(mask.shape[0], *group[1:], *base[-2:])
            mask = _four(mask.to(value.dtype))
        q, k, v = (_four(t.reshape(*group, *t.shape[-2:])) for t in (self.left, self.right.mT, value))
        y = F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale).reshape(*lead, base[-2], -1)
        self.source.note(self, value, y)
        return y if back is None else y.permute(back)

    def added(self, group: torch.Size) -> torch.Tensor | None:
        """What is added to scores of (*group, L, K), perhaps to be broadcast to these; None for nothing."""
        terms = [_regrouped(term, one, group) for one, term in self.terms]
        total = sum(terms[1:], terms[0]) if terms else None
        return None if total is None else total.expand(*total.shape[:-2], *self.base[-2:])


def all_computed(given: Any) -> Any:
    """It, with the numbers that wait in it."""
    return pytree.tree_map_only(WaitingScores, WaitingScores.computed, given)


def _fits(one: torch.Tensor, shape: Any) -> bool:
    """Whether it may be broadcast to a shape."""
    pairs = zip(one.shape[::-1], shape[::-1], strict=False)
    return one.dim() <= len(shape) and all(size in (1, wanted) for size, wanted in pairs)


def _regrouped(term: torch.Tensor, lead: torch.Size, group: torch.Size) -> torch.Tensor:
    """What is added to scores of (*lead, L, K), for those of (*group, L, K)."""
    if lead == group:
        return term
    if term.shape[:-2].numel() == 1:
        return term.reshape((1,) * len(group) + term.shape[-2:])
    return term.expand(*lead, *term.shape[-2:]).reshape(*group, *term.shape[-2:])


def _four(t: torch.Tensor) -> torch.Tensor:
    """(..., L, D) -> (first, others, L, D)."""
    return t[None] if t.dim() == 3 else t.flatten(1, -3)


def as_product(equation: str, left: torch.Tensor, right: torch.Tensor) -> tuple[list[int], list[int], list[int]] | None:
    """How an einsum is a product of (..., I, K) and (..., K, J): the order of dimensions of both, and of what that
    gives. None for another.
    """
    sides = equation.replace(" ", "").replace("->", ",").split(",")
    more = left.dim() - len(sides[0].replace("...", ""))  # in the place of the dots
    a, b, made, *_ = (*(one.replace("...", "ZYXWV"[:more]) for one in sides), "")
    both, inner = [one for one in a if one in b and one in made], [one for one in a if one in b and one not in made]
    order = [*both, *(one for one in a if one not in b), *(one for one in b if one not in a)]
    alike = (len({*a}), len({*b}), len(inner), sorted(made)) == (left.dim(), right.dim(), 1, sorted(order))
    if not alike or not len(a) == len(b) == len(order) == len(both) + 2:
        return None
    orders = (a, [*order[:-1], *inner]), (b, [*both, *inner, order[-1]]), (order, made)
    first, second, whole = ([*map(given.index, wanted)] for given, wanted in orders)
    return first, second, whole


class Seen(NamedTuple):
    """An attention: where it began and ended, its shares and values, and what it gave; None for one of PyTorch's."""

    began: Any
    ended: Any
    scores: Any = None
    value: Any = None
    output: Any = None


class FusedProducts(TorchFunctionMode):
    """Inside, products may wait. place: tells where a model is, where attentions are noted; then `seen` has them, and
    `others` what softmaxes of numbers gave, of which `left` were multiplied.
    """

    patient = False  # products wait on where their numbers have been looked at
    seen: list[Seen]
    others: list[torch.Tensor]
    left: int

    def __init__(self, place: Callable[[], Any] | None = None):
        super().__init__()
        self.place = place
        self.forget()

    def forget(self) -> None:
        self.seen, self.others, self.left = [], [], 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.place is None and func not in WATCHED:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward and kwargs.get("need_weights"):
            self.seen += [] if self.place is None else [Seen(self.place(), self.place())]
            return func(*args, **kwargs | {"need_weights": False})
        if self.others and func in PRODUCTS:
            places = {one.untyped_storage().data_ptr() for one in self.others}
            numbers = (one for one in args if isinstance(one, torch.Tensor) and not isinstance(one, WaitingScores))
            self.left += any(one.untyped_storage().data_ptr() in places for one in numbers)
        if func in PRODUCTS and not kwargs and not any(isinstance(one, WaitingScores) for one in args):
            pair: Any = args if func is not torch.einsum else None
            if func is torch.einsum and len(args) == 3 and (order := as_product(*args)) is not None:
                pair = [one.permute(way) for one, way in zip(args[1:], order[:2], strict=True)]
                pair = pair if order[2] == sorted(order[2]) else None
            if pair is not None and self.fits(*pair):
                return self.begun(*pair)
        made = func(*args, **kwargs)
        if self.place is not None and func in SOFTMAXES and not isinstance(made, WaitingScores):
            axis = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            self.others += [made] if axis in (-1, made.dim() - 1) else []
        return made

    @staticmethod
    def fits(left: torch.Tensor, right: torch.Tensor) -> bool:
        """Whether this may be a product of queries and keys."""
        same = left.dim() == right.dim() > 2 and left.shape[:-2] == right.shape[:-2] and left.dtype == right.dtype
        return same and left.is_floating_point() and left.shape[-1] == right.shape[-2]

    def begun(self, left: torch.Tensor, right: torch.Tensor) -> WaitingScores:
        held = {"left": left, "right": right, "scale": 1.0, "terms": (), "shares": False}
        if self.place is not None:
            held["began"] = self.place(), (left, right), (left._version, right._version)
        form = torch.Size((*left.shape[:-1], right.shape[-1]))
        return WaitingScores.of(form, left.dtype, held | {"source": self})

    def check(self, scores: WaitingScores) -> Any:
        """Where they began, if that is noted. Raises Unfit where what is multiplied has changed since."""
        if self.place is None:
            return None
        place, factors, versions = vars(scores)["began"]
        if any(one._version != version for one, version in zip(factors, versions, strict=True)):
            raise Unfit("what is multiplied changes before the product is used")
        return place

    def note(self, scores: WaitingScores, value: torch.Tensor, output: torch.Tensor) -> None:
        """Keeps an attention in mind, where that is asked for. Raises as `check` does."""
        if self.place is not None:
            self.seen.append(Seen(self.check(scores), self.place(), scores, value, output))
