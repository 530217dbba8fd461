"""How queries and keys are normed per head and rotated by their positions (RoPE, Su et al. 2021), in either order."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from accel_kernels import KV, Norm, paged_attention
from accel_kernels.attention.paged.paged_attention import rotated
from torch import nn

from accel.comparison import agree, named_factor
from accel.llm.parts.norm import HEADS, TURNED, HeadNorm, given, given_back, head_norm, norm_spec
from accel.llm.recording.record import Call, LayerRecord
from accel.patching.guard import plain_settings


class SmallStore:
    """A store of one block a row, empty before every call; `keys` holds what the last call stored."""

    def __init__(self, like: torch.Tensor):
        """like: keys, (rows, tokens, heads, D)."""
        rows = like.shape[0]
        keys, values = (torch.empty(like.shape, dtype=like.dtype, device=like.device) for _ in range(2))
        table = torch.arange(rows, dtype=torch.int32, device=like.device).view(rows, 1)
        metadata = torch.zeros(1, dtype=torch.int64, device=like.device)
        self.kv = KV(keys, values, table, None, metadata, 0, is_prefill=True)
        self.keys = keys

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, **more: Any) -> torch.Tensor:
        """As `accel_kernels.attend`, over these tokens alone."""
        return paged_attention.reference(q, k, v, self.kv, scale, **more)


HALF, EVEN, WHOLE = "first half", "even channels", "all"  # where a table of cosines holds one of each pair's
TWICE = "first half of each half"  # of channels whose halves turn by themselves, by two positions
FORMS = ((HALF, False), (EVEN, True), (HALF, True), (EVEN, False), (WHOLE, False), (WHOLE, True))
COLUMN = "all, of tokens before rows"
FORMS_OF_ENCODERS = (*FORMS, (TWICE, False), (COLUMN, True))
Forms = tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class Rotary:
    """One rotation. form: where in its tables one angle a pair is found. interleaved: pairs are neighbors, not halves.

    name: of the keyword by which the layer is handed (cos, sin), or (sin, cos) with sine_first, also as halves of one
    tensor, or cos + i sin; or, where they are not `given`, of the attention's buffer, a table (positions, sin | cos) as
    in GPT-J, or of its module that makes them, as in Moshi. backward: turned the other way, as in NanoChat. maker: that
    module's class, settings and buffers; equal ones make equal angles.
    """

    name: str
    given: bool
    form: str
    interleaved: bool
    sine_first: bool = False
    backward: bool = False
    maker: tuple | None = None

    @property
    def parts(self) -> int:
        """How many parts of a head turn by themselves, see `accel_kernels.rotated_heads`."""
        return 2 if self.form == TWICE else 1

    @property
    def table(self) -> bool:
        """Whether positions are looked up in a table of the layer's."""
        return not self.given and self.maker is None

    def angles(self, kwargs: dict, attention: nn.Module, tokens: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin of one angle a pair, (1 or rows, new, R / 2). tokens: where there are more than angles, the first of
        them do not turn, as the tokens before the patches of an image.
        """
        cos, sin = (one if one.dim() == 3 else one[None] for one in self._tables(kwargs, attention))
        cos, sin = self._one_a_pair(cos), self._one_a_pair(-sin if self.backward else sin)
        if 0 < (more := tokens - cos.shape[1]):
            cos, sin = (F.pad(one, (0, 0, more, 0), value=still) for one, still in ((cos, 1.0), (sin, 0.0)))
        return cos, sin

    def fits(self, kwargs: dict, attention: nn.Module | None) -> bool:
        """Whether the table holds each angle as often as the form says: small angles hardly differ from none."""
        table = self._tables(kwargs, attention)[1]
        alike = set()
        if table.shape[-1] % 2 == 0:
            halves, pairs = table.unflatten(-1, (2, -1)), table.unflatten(-1, (-1, 2))
            alike |= {HALF} if torch.equal(halves[..., 0, :], halves[..., 1, :]) else set()
            alike |= {EVEN} if torch.equal(pairs[..., 0], pairs[..., 1]) else set()
            if table.shape[-1] % 4 == 0:
                alike |= {TWICE} if torch.equal(*halves.unflatten(-1, (2, -1)).unbind(-2)) else set()
        column = {COLUMN} if table.dim() == 3 and table.shape[1] == 1 else set()
        return self.form in (alike or {WHOLE}) | column

    def source(self, kwargs: dict, attention: nn.Module) -> object:
        """What the angles are made from; the same object in two layers means the same angles."""
        if self.maker is not None:
            return kwargs["position_ids"]
        return kwargs[self.name] if self.given else attention._buffers[self.name]

    def _tables(self, kwargs: dict, attention: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.given or self.maker is not None:
            value = kwargs[self.name] if self.given else self._made(kwargs["position_ids"], attention)
            if isinstance(value, torch.Tensor):
                value = (value.real, value.imag) if value.is_complex() else value[:, 0].chunk(2, dim=-1)
            first, second = value
            return (second, first) if self.sine_first else (first, second)
        table: Any = attention._buffers[self.name]
        sin, cos = table[kwargs["position_ids"]].chunk(2, dim=-1)
        return cos, sin

    def _made(self, positions: torch.Tensor, attention: nn.Module) -> Any:
        return attention.get_submodule(self.name)(positions.new_empty(0, dtype=torch.float32), positions)

    def _one_a_pair(self, table: torch.Tensor) -> torch.Tensor:
        if self.form == HALF:
            return table[..., : table.shape[-1] // 2]
        if self.form == TWICE:
            return table.unflatten(-1, (2, 2, -1))[..., 0, :].flatten(-2)
        if self.form == COLUMN:
            return table.transpose(0, 1)
        return table[..., ::2] if self.form == EVEN else table


def rotaries(layer: LayerRecord, k: torch.Tensor, keys: torch.Tensor, forms: Forms = FORMS) -> Iterator[Rotary | None]:
    """The rotations, None among them, that turn k, (rows, tokens, heads, D), into the stored keys."""
    if agree(k, keys.transpose(1, 2)):
        yield None
    kwargs = layer.call.named
    for rotary in (one for one in rotary_candidates(layer, forms) if one.fits(kwargs, layer.attention)):
        cos, sin = rotary.angles(kwargs, layer.attention, k.shape[1])
        if 0 < 2 * cos.shape[-1] <= k.shape[-1] and cos.shape[0] in (1, len(k)):
            turned = rotated(k, cos.to(k.dtype), sin.to(k.dtype), rotary.interleaved, rotary.parts)
            if agree(turned, keys.transpose(1, 2)):
                yield rotary


def rotary_candidates(layer: LayerRecord, forms: Forms = FORMS) -> list[Rotary]:
    """All ways to read what the layer was handed as a table of angles."""
    kwargs = layer.call.named
    named = [(name, None) for name, value in kwargs.items() if _tables(value)]
    made = [(layer.attention, call) for call in layer.inside(layer.attention) if _makes_angles(call, kwargs)]
    candidates = [
        Rotary(name, maker is None, form, interleaved, sine_first, backward, maker)
        for sine_first, backward in product((False, True), (False, True))
        for name, maker in (*named, *(_maker(*one) for one in made))
        for form, interleaved in forms
    ]
    if isinstance(kwargs.get("position_ids"), torch.Tensor):
        candidates += [
            Rotary(name, False, WHOLE, interleaved)
            for name, table in layer.attention.named_buffers(recurse=False)
            if table is not None and table.dim() == 2 and table.shape[1] > 1
            for interleaved in (True, False)
        ]
    return candidates


def _makes_angles(call: Call, kwargs: dict) -> bool:
    """Whether a module made them of something and the layer's positions."""
    positions = kwargs.get("position_ids")
    return positions is not None and len(call.args) == 2 and call.args[1] is positions and _tables(call.result)


def _maker(attention: nn.Module, call: Call) -> tuple[str, tuple]:
    """The name and identity of the module that made angles."""
    name = next(name for name, module in attention.named_children() if module is call.module)
    buffers = tuple((one, tuple(t.flatten().tolist())) for one, t in call.module.named_buffers())
    return name, (type(call.module), plain_settings(call.module), buffers)


def _tables(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        halves = value.is_floating_point() and value.dim() == 4 and value.shape[1] == 1 and value.shape[-1] % 2 == 0
        return halves or (value.dim() == 3 and value.is_complex())
    tables = value if isinstance(value, tuple | list) and len(value) == 2 else ()
    return bool(tables) and all(
        isinstance(t, torch.Tensor) and t.dim() in (2, 3) and t.is_floating_point() for t in tables
    )


@dataclass(frozen=True)
class Turning:
    """One way that fits the stored keys. fields: of a `SoftmaxSpec`. q, k: (rows, tokens, heads, D), and arguments, as
    `accel_kernels.paged_attention` takes them; norms before the rotation have been applied to them.
    """

    fields: dict[str, Any]
    q: torch.Tensor
    k: torch.Tensor
    arguments: dict[str, Any]

    @cached_property
    def queries(self) -> torch.Tensor:
        """Normed and rotated."""
        norm = self.arguments.get("q_norm")
        return _stored(self.q, self.arguments | {"k_norm": norm})


def turnings(
    layer: LayerRecord, calls: list[Call], q: torch.Tensor, k: torch.Tensor, forms: Forms = FORMS
) -> Iterator[Turning]:
    """Of what projections give, q and k, (rows, tokens, heads, D)."""
    keys = layer.cached.keys
    for k_norm, normed_k in head_norm(layer, calls, k):
        for key_scale, rotary in _scaled(layer, normed_k, forms):
            for q_norm, normed_q in head_norm(layer, calls, q):
                fields = _fields(rotary, q_norm, k_norm, key_scale)
                yield Turning(fields, normed_q, normed_k * key_scale, _angles(layer, rotary, q))
    for k_call, layout in _norms(calls, keys.transpose(1, 2), made=True):
        k_norm, k_formula = _fused(layer, k_call, layout)
        turned = given_back(k_call.input.held, layout, k.shape[-1])
        for rotary in rotaries(layer, k, turned.transpose(1, 2)) if k_formula is not None else ():
            angles = _angles(layer, rotary, q)
            for q_call, q_layout in _norms(calls, _stored(q, angles), made=False):
                q_norm, q_formula = _fused(layer, q_call, q_layout)
                if q_formula is not None:
                    norms = {"q_norm": q_formula, "k_norm": k_formula, "norms_after": True}
                    yield Turning(_fields(rotary, q_norm, k_norm, 1.0, after=True), q, k, angles | norms)


def _scaled(layer: LayerRecord, k: torch.Tensor, forms: Forms) -> Iterator[tuple[float, Rotary | None]]:
    """By what keys are multiplied, and how they are rotated, to be those that are stored."""
    keys = layer.cached.keys
    length = float(keys.double().norm() / k.double().norm().clamp_min(1e-30))  # which no rotation changes
    for number in dict.fromkeys((1.0, named_factor(length, keys.dtype, (layer.attention, layer.layer)) or 1.0)):
        for rotary in rotaries(layer, k * number, keys, forms):
            yield number, rotary


def _fields(
    rotary: Rotary | None, q_norm: HeadNorm | None, k_norm: HeadNorm | None, key_scale: float, after: bool = False
) -> dict[str, Any]:
    return {"q_norm": q_norm, "k_norm": k_norm, "key_scale": key_scale, "rotary": rotary, "norms_after": after}


def _angles(layer: LayerRecord, rotary: Rotary | None, q: torch.Tensor) -> dict[str, Any]:
    if rotary is None:
        return {}
    cos, sin = (t.to(q.dtype) for t in rotary.angles(layer.call.named, layer.attention, q.shape[1]))
    more = {"parts": rotary.parts} if rotary.parts > 1 else {}
    return {"cos": cos, "sin": sin, "interleaved": rotary.interleaved, **more}


def _stored(t: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    if "parts" in arguments:  # which no store knows
        return rotated(t, arguments["cos"], arguments["sin"], False, arguments["parts"])
    store = SmallStore(t)
    store(t, t, t, 1.0, **arguments)
    return store.keys


def _norms(calls: list[Call], t: torch.Tensor, made: bool) -> Iterator[tuple[Call, str]]:
    """Calls that gave t, (rows, tokens, heads, D), or were given what rounding makes of it; each with its layout."""
    for call in calls:
        if not call.alone or call.made is None or call.output.held.shape != call.input.held.shape:
            continue
        for layout in (HEADS, TURNED):
            wanted, held = given(t, layout), call.output.held if made else call.input.held
            if held.shape == wanted.shape and (torch.equal(held, wanted) if made else agree(wanted, held)):
                yield call, layout


def _fused(layer: LayerRecord, call: Call, layout: str) -> tuple[HeadNorm, Norm | None]:
    """A norm of heads, and its formula if attention can apply it."""
    norm = HeadNorm(norm_spec(layer, call), layout)
    kind = norm.norm.kind
    fits = kind is not None and not kind.centered and kind.bias is None
    return norm, kind.of(call.module) if kind is not None and fits else None
