"""Layers that attend in windows of a picture, as Swin's: their own code tells where tokens stand, and what is added to
scores.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from accel.encoders.waiting_scores import PRODUCTS, FusedProducts, WaitingScores
from accel.errors import Unfit, reason_of
from accel.in_flight import listening
from accel.llm.attention.softmax_attention import BoundSoftmaxAttention
from accel.llm.parts.part import NormedInput
from accel.llm.recording.inputs import ROWS
from accel.llm.recording.record import NotUnderstood, Value, given_names
from accel.llm.recording.resting import resting
from accel.patching.fast_forward import Kernels

NORMS = {F.layer_norm, torch.layer_norm}
ALIGNED = 8  # numbers, by which rows of what is added to scores begin


class Windows(NamedTuple):
    """rows: (W * L,), which of T tokens stands in each place of W windows, 0 for padding; hidden: (W * L, 1) bool,
    where that is; None for none. places: (T,), where each token stands. shifts: (W, 1, L, L), what is added to scores
    of all heads; None for nothing. length: L.
    """

    length: int
    rows: torch.Tensor
    hidden: torch.Tensor | None
    places: torch.Tensor
    shifts: torch.Tensor | None


class Moved(Value):
    """A tensor of which others hold copies."""

    def same(self, other: Value | None) -> bool:
        return other is not None and torch.equal(self.held.flatten(), other.held.flatten())


class _Seen(Exception):
    """scores: what is added to them, (W or 1, heads, L, L); None for nothing."""

    def __init__(self, added: torch.Tensor | None):
        self.added = added


class _Look(FusedProducts):
    """Runs a layer's own code up to its attention: norms change nothing, and linears give zeros. windows: what the
    first of these was given.
    """

    windows: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in NORMS:
            return args[0]
        if func is F.linear:
            self.windows = args[0] if self.windows is None else self.windows
            return args[0].new_zeros(()).expand(*args[0].shape[:-1], len(args[1]))
        if func is F.scaled_dot_product_attention:
            raise _Seen((kwargs or {}).get("attn_mask", args[3] if len(args) > 3 else None))
        scores = args[0] if func in PRODUCTS else None
        if isinstance(scores, WaitingScores) and scores.shares:
            lead = max((one for one, _ in scores.terms), key=len, default=scores.form[:-2])
            added = scores.added(lead)
            raise _Seen(None if added is None else added.flatten(0, -4))
        return super().__torch_function__(func, types, args, kwargs)


def _look(code: Callable, *given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the first linear is given in a call of this code, and what is added to scores."""
    look = _Look()
    try:
        with look:
            code(*given, **named)
    except _Seen as seen:
        if look.windows is not None:
            return look.windows, seen.added
    raise Unfit("its code does not come to an attention in windows")


def added_by(layer: nn.Module, length: int, kwargs: dict[str, Any], device: torch.device) -> torch.Tensor:
    """What a layer's own code, told this, adds to scores of so many tokens, where it hangs on none of them."""
    added = _look(type(layer).forward, layer, torch.zeros(1, length, 1, device=device), **kwargs)[1]
    if added is None:
        raise Unfit("its code adds nothing to scores")
    return added


def own_bias(attention: nn.Module, length: int, device: torch.device) -> torch.Tensor | None:
    """What an attention adds to scores by where tokens stand in a window of so many, (1, heads, L, L)."""
    return _look(type(attention).forward, attention, torch.zeros(1, length, 1, device=device))[1]


def seen_windows(layer: nn.Module, attention: nn.Module, x: torch.Tensor, kwargs: dict[str, Any]) -> Windows:
    """Of a call of the layer with x, (B, T, C). Raises Unfit."""
    tokens = x.shape[1]
    numbers = torch.arange(1, tokens + 1, dtype=torch.float32, device=x.device)
    windows, added = _look(type(layer).forward, layer, numbers.view(1, -1, 1), **kwargs)
    rows, length = windows.reshape(-1).long(), windows.shape[1]
    own = own_bias(attention, length, x.device)
    shifts = added if added is None or own is None else (added - own)[:, :1]
    places = torch.empty(tokens + 1, dtype=torch.int64, device=x.device)
    places.scatter_(0, rows, torch.arange(len(rows), device=x.device))
    hidden = None if len(rows) == tokens else (rows == 0)[:, None]
    return Windows(length, (rows - 1).clamp_(min=0), hidden, places[1:], shifts)


def blocks_in(model: nn.Module) -> dict[str, nn.Module]:
    """By path what lists hold that are in lists, as blocks of stages are."""
    lists = {path: one for path, one in model.named_modules() if type(one) is nn.ModuleList}
    inner = [path for path in lists if any(path.startswith(f"{other}.") for other in lists)]
    return {f"{path}.{name}": one for path in inner for name, one in lists[path].named_children()}


def one_window(model: nn.Module, call: dict[str, Any]) -> dict[str, tuple[nn.Module, torch.Tensor | None, dict]]:
    """By path the blocks of stages that a call runs, and for each a call of pictures as large as its windows; no tokens
    where they do not stand in order there, as shifts move them. Raises NotUnderstood.
    """
    blocks, noted = blocks_in(model), dict[nn.Module, tuple[torch.Tensor, dict]]()

    def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
        if args and isinstance(args[0], torch.Tensor) and args[0].dim() == 3:
            noted[module] = args[0], dict(zip(given_names(module), args[1:], strict=False)) | kwargs

    with resting(model), listening(((one, note) for one in blocks.values()), before=True):
        type(model).forward(model, **call)
    found = {}
    for path, block in blocks.items():
        x, named = noted.get(block, (torch.empty(0, 0, 0, device="cpu"), {}))
        sizes = [name for name, one in named.items() if _is_size(one, x.shape[1])]
        if len(sizes) != 1:
            raise NotUnderstood("its blocks are not told how large a picture is")
        numbers = torch.arange(1.0, x.shape[1] + 1, device=x.device)
        try:
            with resting(model):
                windows, _ = _look(type(block).forward, block, numbers.view(1, -1, 1), **named)
            length = windows.shape[1]
            side, one = math.isqrt(length), torch.arange(1.0, length + 1, device=x.device).view(1, -1, 1)
            if side**2 != length or not torch.equal(windows[windows > 0].sort()[0], numbers):
                raise NotUnderstood("its blocks do not attend in windows")
            named[sizes[0]] = side, side
            with resting(model):
                ordered = torch.equal(_look(type(block).forward, block, one, **named)[0], one)
        except Exception as error:  # whatever its code may raise
            raise NotUnderstood(f"its blocks could not be examined: {reason_of(error)}") from error
        generator = torch.Generator().manual_seed(0)
        example = torch.randn(ROWS, length, x.shape[2], generator=generator, device="cpu").to(x)
        found[path] = block, example if ordered else None, named
    return found


def _is_size(one: Any, tokens: int) -> bool:
    pair = isinstance(one, tuple | list) and [type(n) for n in one] == [int, int]
    return pair and math.prod(one) == tokens


class BoundWindowAttention(BoundSoftmaxAttention):
    """One attention with the tensors it reads, in the windows of a step."""

    def __call__(self, kernels: Kernels, step: Any, h: NormedInput, kwargs: dict) -> torch.Tensor:
        """See `BoundAttention`; one row with the tokens of all pictures."""
        (batch, tokens), windows = step.shape, step.windows
        x = h.normed().view(batch, tokens, -1).index_select(1, windows.rows)
        if windows.hidden is not None:
            x.masked_fill_(windows.hidden, 0.0)
        y = super().__call__(kernels, step, NormedInput(x.flatten(0, 1)[None]), kwargs)
        return y.view(batch, len(windows.rows), -1).index_select(1, windows.places).flatten(0, 1)[None]

    def attended(self, kernels: Kernels, step: Any, parts: Any, kwargs: dict) -> torch.Tensor:
        length, shifts = step.windows.length, step.windows.shifts
        own = own_bias(self.module, length, self.device)
        q, k, v = (t[0].unflatten(0, (-1, length)).transpose(1, 2) for t in parts[:3])
        added = shifts if own is None else own if shifts is None else own + shifts
        if added is not None:
            added = F.pad(added.to(q.dtype), (0, -length % ALIGNED))  # else PyTorch does, of every picture's
            added = added.repeat(len(q) // len(added), 1, 1, 1) if len(added) > 1 else added
            added = added[..., :length]
        y = F.scaled_dot_product_attention(q, k, v, added, scale=self.spec.scale)
        return y.transpose(1, 2).reshape(1, q.shape[0] * length, -1)
