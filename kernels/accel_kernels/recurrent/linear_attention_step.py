"""One token of a layer of linear attention, from what its first product gives to what its last one takes.

Gated delta rule: Yang et al. 2024, with a decay of each channel Kimi Linear 2025; state space: Dao and Gu 2024.
"""

from typing import NamedTuple

import torch

from accel_kernels.norm.norm import ACTIVATIONS
from accel_kernels.norm.rms_norm import GATES
from accel_kernels.op import dtype_reason, make_op, random_cases
from accel_kernels.recurrent import causal_convolution as convolutions
from accel_kernels.recurrent.causal_convolution import some_rows, some_sequences
from accel_kernels.recurrent.recurrence import Decay, chunk, gates, prepared, wide


class Convolution(NamedTuple):
    """The causal convolution through which q, k and v go, see `causal_convolution`.

    order: of their channels in weight (C, taps), bias (C,) and window (slots, taps, C): "qkv" or "vkq". It is fastest
    where the channels of weight, too, lie next to each other.
    """

    weight: torch.Tensor
    window: torch.Tensor
    bias: torch.Tensor | None = None
    activation: str | None = "silu"
    order: str = "qkv"


class GatedNorm(NamedTuple):
    """The RMS norm over a value head, with weight (Dv,), times an activation of the gate, a name of GATES.

    gate: (B, key heads, repeat, Dv). rounded: to the dtype of the values after the norm, and to the wider of theirs and
    the weight's after the weight. Without it only at the end.
    """

    gate: torch.Tensor
    weight: torch.Tensor
    eps: float
    activation: str = "silu"
    rounded: bool = False


def reference(
    q, k, v, a, decay, state, sequences, *, scale, b=None, beta_scale=1.0, key_eps=None, convolution=None, skip=None,
    norm=None, dtype=None,
):  # fmt: skip
    """q, k: (B, key heads, Dk); v: (B, key heads, repeat, Dv); a: like v without Dv, or with Dk. Gives (B, heads * Dv).

    Any strides, so parts of one product can be given; the last one 1. Each key head serves `repeat` value heads.
    state: (slots, heads, Dk, Dv), any strides, float32; it is written. sequences: one for each row, without spans.
    decay: a `Decay`. b: like v without Dv, logits of beta, which is multiplied by beta_scale; None is the state space
    model's rule. key_eps: queries and keys are divided by their length; scale: of queries. skip: (heads,), adds skip v.
    dtype: of the result, that of v where None.
    """
    if convolution is not None:
        q, k, v = _convolved(q, k, v, convolution, sequences)
    out = v.new_zeros(v.shape[0], v.shape[1] * v.shape[2], v.shape[3], dtype=dtype)
    live = [(begin, slot, position > first, into) for begin, _, slot, position, first, into in sequences.each(1)]
    if live:
        rows, slots, begun, into = torch.tensor(live, device=q.device).unbind(1)
        g, strength = gates(a.flatten(1, 2)[rows], decay, None if b is None else b.flatten(1, 2)[rows], beta_scale)
        parts = (*prepared(q[rows], k[rows], v[rows], scale, key_eps), g, strength)
        tokens_of = [t.flatten(0, 1).unsqueeze(1) for t in parts]  # rows and heads as one, of one token
        read, written = sequences.pools(state, sequences.other_state)
        before = torch.where(begun.view(-1, 1, 1, 1) > 0, read[slots], 0).to(parts[0].dtype)
        y, after = chunk(tokens_of, before.flatten(0, 1), b is not None)
        written[into] = after.view(before.shape).to(state.dtype)
        y = y.view(before.shape[0], *out.shape[1:])
        out[rows] = (y if skip is None else y + skip[:, None] * parts[2]).to(out.dtype)
        if norm is not None:
            out[rows] = _normalized(out[rows], norm._replace(gate=norm.gate.flatten(1, 2)[rows]))
    return out.flatten(1)


def _convolved(q, k, v, convolution, sequences):
    weight, window, bias, activation, order = convolution
    given = {"q": q, "k": k, "v": v}
    parts = [given[name].flatten(1) for name in order]
    x = torch.cat(parts, -1).unsqueeze(1)
    y = convolutions.reference(x, weight, window, sequences, bias=bias, activation=activation).squeeze(1)
    found = dict(zip(order, y.split([part.shape[1] for part in parts], -1), strict=True))
    return tuple(found[name].view(part.shape) for name, part in given.items())


def _normalized(x, norm):
    gate, weight, eps, activation, rounded = norm
    kind = wide(x.dtype)
    y = x.to(kind) * torch.rsqrt(x.to(kind).square().mean(-1, keepdim=True) + eps)
    y = weight * y.to(x.dtype) if rounded else weight.to(kind) * y
    return (y * GATES[activation](gate.to(kind))).to(x.dtype)


def supports(
    q, k, v, a, decay, state, sequences, *, scale, b=None, beta_scale=1.0, key_eps=None, convolution=None, skip=None,
    norm=None, dtype=None,
) -> str | None:  # fmt: skip
    if (reason := state_reason(q, k, v, a, decay, state, b)) is not None:
        return reason
    if sequences.spans is not None:
        return "spans of tokens"
    if (size := _padded(k.shape[-1]) * _padded(v.shape[-1])) > 32768:
        return f"states of {size} numbers, more than 32768"
    if convolution is not None:
        if convolution.activation is not None and convolution.activation not in ACTIVATIONS:
            return f"activation {convolution.activation!r}"
        if not convolution.window.is_contiguous() or convolution.window.dtype != q.dtype:
            return "a window that is not contiguous or of another dtype"
        if convolution.order not in ("qkv", "vkq"):
            return f"channels in the order {convolution.order!r}"
    if norm is not None and (norm.activation not in GATES or norm.gate.stride(-1) != 1):
        return f"a gate {norm.activation!r}, or channels of it not next to each other"
    return dtype_reason(q, *(t for t in (skip, *(norm or ())[:2], *(convolution or ())[:3]) if t is not None))


def _padded(size: int) -> int:
    return 1 << max(4, (size - 1).bit_length())


def state_reason(q, k, v, a, decay, state, b) -> str | None:
    """Why kernels cannot take these, of a step or of a prompt."""
    if q.numel() == 0:
        return "empty"
    if any(t.stride(-1) != 1 for t in (q, k, v)):
        return "channels not next to each other"
    if k.shape[-1] > 256:
        return f"{k.shape[-1]} key channels, more than 256"
    if state.dtype != torch.float32:
        return f"states in {state.dtype}"
    if k.dtype != q.dtype or v.dtype != q.dtype:
        return "queries, keys and values of different dtypes"
    if decay.bias.dim() == 2 and (a.stride(-1) != 1 or a.shape[-1] != k.shape[-1]):
        return "decays that are not of key channels next to each other"
    return dtype_reason(q, a, b, decay.a_log, decay.bias, state)


def gate_arguments(rand, rows, heads, repeat, key_dim, *, channels=False, delta=True, lower_bound=None, rounded=False,
                   limits=(0.0, float("inf"))):  # fmt: skip
    """a, the decay and what there is of the delta rule, of random numbers."""
    count = heads * repeat
    a = rand(*rows, heads, repeat, *([key_dim] if channels else []))
    bias = rand(count, *([key_dim] if channels else []), mean=-1.0)
    decay = Decay(rand(count, spread=0.5), bias, lower_bound, limits, rounded)
    return a, decay, {"b": rand(*rows, heads, repeat)} if delta else {}


@random_cases
def _case(rand, rows, heads, repeat, key_dim, value_dim, *, taps=4, fused=True, norm=None, skip=False, idle=(),
          positions=None, order="qkv", key_eps=1e-6, stored=None, firsts=None, apart=False, **gating):  # fmt: skip
    """norm: its activation and whether it is rounded."""

    channels = (heads * key_dim, heads * key_dim, heads * repeat * value_dim, heads * repeat * value_dim)
    q, k, v, gate = rand(rows, sum(channels)).split(channels, dim=1)
    q, k = (t.unflatten(1, (heads, key_dim)) for t in (q, k))
    v, gate = (t.unflatten(1, (heads, repeat, value_dim)) for t in (v, gate))
    a, decay, more = gate_arguments(rand, (rows,), heads, repeat, key_dim, **gating)
    pool = rows * (1 + apart) + 2 if stored is None else rows
    state = rand(pool, heads * repeat, key_dim, value_dim, dtype=torch.float32)
    if fused:
        width = sum(channels[:3])
        window = rand(pool, taps, width)
        bias = rand(width) if order == "vkq" else None
        more["convolution"] = Convolution(rand(taps, width, spread=0.5).t(), window, bias, order=order)
    if order == "vkq":
        state = state.transpose(2, 3).contiguous().transpose(2, 3)
    if stored is None:
        pools = (state, more["convolution"].window) if apart else None
        positions = positions or [n + 3 for n in range(rows)]
        sequences = some_sequences(rand, rows, positions, idle=idle, apart=pools)
    else:
        sequences = some_rows(rand, stored, state, more["convolution"].window if fused else None, firsts)
    if norm is not None:
        more["norm"] = GatedNorm(gate, rand(value_dim), 1e-6, *norm)
    if skip:
        more["skip"] = rand(heads * repeat)
    more |= {"scale": key_dim**-0.5, "key_eps": key_eps}
    return (q, k, v, a, decay, state, sequences), more


SPACE = {"delta": False, "key_eps": None, "skip": True, "order": "vkq", "rounded": True}
LIGHTNING = {"delta": False, "key_eps": None, "limits": (1.0, 1.0)}  # a head decays by a number of its own
CASES = (
    _case("qwen", 2, 2, 2, 32, 32, norm=("silu", True), small=True),
    _case("odd", 3, 1, 3, 20, 28, norm=("silu", False), positions=[0, 1, 9], idle=(2,), small=True),
    _case("apart", 3, 1, 2, 16, 32, norm=("silu", True), idle=(1,), apart=True, small=True),
    _case("kimi", 2, 3, 1, 32, 16, channels=True, norm=("sigmoid", False), small=True),
    _case("bounded", 2, 2, 1, 16, 48, channels=True, lower_bound=-5.0, rounded=True, small=True),
    _case("bare", 1, 2, 2, 16, 16, fused=False, small=True),
    _case("space", 2, 2, 3, 24, 32, small=True, **SPACE),
    _case("space-taps", 2, 1, 4, 16, 16, taps=2, positions=[0, 5], small=True, **SPACE),
    _case("row", 2, 2, 2, 16, 32, norm=("silu", True), stored=7, small=True),
    _case("row-padded", 4, 1, 2, 16, 16, stored=3, firsts=[0, 2, 3, 5], small=True, **SPACE),
    _case("row-bare", 2, 1, 2, 16, 16, fused=False, stored=0, small=True),
    _case("lightning", 2, 3, 1, 32, 32, **LIGHTNING, fused=False, stored=3, small=True),
    _case("minimax-01", 1, 64, 1, 128, 128, **LIGHTNING, fused=False),
    _case("qwen3.5-9b-row", 1, 16, 2, 128, 128, norm=("silu", True), stored=700),
    _case("qwen3.5-9b", 1, 16, 2, 128, 128, norm=("silu", True)),
    _case("qwen3.6-27b", 8, 16, 3, 128, 128, norm=("silu", True)),
    _case("qwen3.6-35b-64", 64, 16, 2, 128, 128, norm=("silu", True)),
    _case("olmo-hybrid", 2, 30, 1, 96, 192, norm=("silu", True)),
    _case("kimi-linear", 1, 32, 1, 128, 128, channels=True, norm=("sigmoid", False)),
    _case("nemotron-h-9b", 1, 8, 16, 128, 80, **SPACE),
    _case("falcon-h1-7b", 1, 1, 24, 256, 128, **SPACE),
    _case("mamba2-2.7b", 16, 1, 80, 128, 64, **SPACE),
)  # fmt: skip

linear_attention_step = make_op("linear_attention_step", reference, supports, CASES, changes=True)
