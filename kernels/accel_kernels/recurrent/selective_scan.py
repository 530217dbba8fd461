"""The scan of a state space model in which each channel has a state of its own, Mamba-1: Gu and Dao 2023."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from accel_kernels.norm import norm
from accel_kernels.norm.norm import Norm, norm_weights
from accel_kernels.op import dtype_reason, make_op, random_cases
from accel_kernels.recurrent.causal_convolution import some_rows, some_sequences
from accel_kernels.recurrent.recurrence import wide


class Widening(NamedTuple):
    """What makes steps in time, keys and queries: an RMSNorm of each of the three, or None; then, of one token, the
    product of the steps, (..., R), with weight (C, R). Without weight, steps have no norm.
    """

    weight: torch.Tensor | None = None
    norms: tuple[Norm | None, ...] = (None, None, None)


def reference(x, dt, a_log, k, q, state, sequences, *, bias=None, skip=None, gate=None, anew=False, widening=None):
    """x, dt, gate: (B, T, C); k, q ("B" and "C" of the paper): (B, T, N); a_log: (C, N); bias, skip: (C,).

    With dt = softplus(dt + bias), rounded to its dtype: state <- exp(-exp(a_log) dt) state + dt x k, y = state q + skip
    x, times silu of the gate. state: (slots, C, N), any strides, float32; it is read where a sequence goes on, but
    not with `anew`, and written. Gives (B, T, C). Any strides, the last one 1. widening: a `Widening`, of dt (B, T, R).
    """
    kind, tokens = wide(x.dtype), x.shape[1]
    if widening is not None:
        given = zip((dt, k, q), widening.norms, strict=True)
        dt, k, q = (t if one is None else norm.reference(t, one) for t, one in given)
        dt = dt if widening.weight is None else F.linear(dt, widening.weight)
    dt = F.softplus(dt if bias is None else dt + bias.to(dt.dtype)).to(kind)
    rate = -a_log.to(kind).exp()
    x_of, k_of, q_of = (t.to(kind).flatten(0, 1) for t in (x, k, q))
    dt, gate_of = dt.flatten(0, 1), None if gate is None else gate.to(kind).flatten(0, 1)
    out = torch.zeros_like(x_of)
    read, written = sequences.pools(state, sequences.other_state)
    for begin, end, slot, position, first, into in sequences.each(tokens):
        kept = read[slot].to(kind) if position > first and not anew else torch.zeros_like(read[slot], dtype=kind)
        for token in range(begin, end):
            step = dt[token, :, None]
            kept = kept * (rate * step).exp() + (step * x_of[token, :, None]) * k_of[token]
            out[token] = kept @ q_of[token]
            if skip is not None:
                out[token] += skip.to(kind) * x_of[token]
            if gate_of is not None:
                out[token] *= F.silu(gate_of[token])
        written[into] = kept.to(state.dtype)
    return out.view(x.shape).to(x.dtype)


def supports(
    x, dt, a_log, k, q, state, sequences, *, bias=None, skip=None, gate=None, anew=False, widening=None
) -> str | None:  # fmt: skip
    if x.numel() == 0:
        return "empty"
    matrix, beside = Widening() if widening is None else widening
    if any(one is not None and (one.centered or one.bias is not None or one.offset) for one in beside):
        return "a norm with a mean, a bias or an offset"
    if matrix is None and beside[0] is not None:
        return "a norm of wide steps"
    if matrix is not None and (x.shape[1] > 1 or dt.shape[-1] > 1024 or not matrix.is_contiguous()):
        return "steps to be widened of several tokens, or of more than 1024 numbers"
    if any(t is not None and t.stride(-1) != 1 for t in (x, dt, k, q, gate)):
        return "channels not next to each other"
    if k.shape[-1] > 256:
        return f"states of {k.shape[-1]} numbers a channel, more than 256"
    if state.dtype != torch.float32:
        return f"states in {state.dtype}"
    if not a_log.is_contiguous():
        return "a_log not contiguous"
    weights = [weight for one in beside for weight in norm_weights(one)]
    return dtype_reason(x, dt, a_log, k, q, state, bias, skip, gate, matrix, *weights)


@random_cases
def _case(
    rand, batch, tokens, channels, size, positions, *, spans=None, idle=(), gate=True, stored=None, anew=False,
    rank=None, norms=False, apart=False, **rows
):  # fmt: skip
    """rank: of steps that are to be widened; norms: the steps' and the queries' with a weight, the keys' without."""
    count = len(positions) if stored is None else batch - 2
    x, dt, by = rand(batch, tokens, 3 * channels).chunk(3, dim=-1)
    k, q = rand(batch, tokens, 2 * size).chunk(2, dim=-1)
    state = rand(count * (1 + apart) + 2, channels, size, dtype=torch.float32)
    more = {"bias": rand(channels, mean=-2.0), "skip": rand(channels), "gate": by if gate else None}
    more |= {"anew": True} if anew else {}
    if rank is not None:
        beside = (Norm(rand(rank), None, 1e-5), Norm(None, None, 1e-6), Norm(rand(size), None, 1e-5))
        given = (rand(channels, rank, spread=rank**-0.5), *((beside,) if norms else ()))
        dt, more["widening"] = rand(batch, tokens, rank), Widening(*given)
    elif norms:
        more["widening"] = Widening(None, (None, Norm(rand(size), None, 1e-5), Norm(rand(size), None, 1e-5)))
    if stored is None:
        sequences = some_sequences(rand, count, positions, spans, None, idle, (state, None) if apart else None)
    else:
        sequences = some_rows(rand, stored, state, None, **rows)
    return (x, dt, rand(channels, size, spread=0.5), k, q, state, sequences), more


CASES = (
    _case("odd", 2, 9, 37, 16, [0, 4], small=True),
    _case("step", 3, 1, 40, 12, [3, 0, 7], idle=(2,), small=True),
    _case("packed", 1, 20, 16, 4, [0, 3], spans=[(2, 9), (10, 19)], gate=False, small=True),
    _case("apart", 1, 20, 16, 4, [0, 3], spans=[(2, 9), (10, 19)], apart=True, small=True),
    _case("ragged", 1, 24, 20, 4, [5, 0, 2], spans=[(0, 1), (2, 2), (3, 22)], norms=True, apart=True, small=True),
    _case("ragged-step", 3, 1, 40, 12, [3, 0, 7], rank=6, idle=(2,), apart=True, small=True),
    _case("row-step", 3, 1, 40, 12, [], stored=2, firsts=[0, 2, 3], small=True),
    _case("widened", 3, 1, 40, 12, [3, 0, 7], rank=6, idle=(2,), small=True),
    _case("widened-row", 3, 1, 37, 4, [], rank=20, norms=True, stored=2, firsts=[0, 2, 3], small=True),
    _case("rows-padded", 3, 9, 20, 4, [], stored=0, firsts=[8, 0, 3], last=6, small=True),
    _case("normed", 2, 9, 20, 12, [0, 4], norms=True, small=True),
    _case("rows-go-on", 2, 9, 20, 4, [], stored=5, last=6, small=True),
    _case("rows-begin-anew", 2, 9, 20, 4, [], stored=5, anew=True, small=True),
    _case("falcon-mamba-step", 1, 1, 8192, 16, [500]),
    _case("falcon-mamba-widened", 1, 1, 8192, 16, [500], rank=256, norms=True),
    _case("falcon-mamba-512", 1, 512, 8192, 16, [0]),
)

selective_scan = make_op("selective_scan", reference, supports, CASES, changes=True)
