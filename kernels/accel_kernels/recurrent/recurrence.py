"""What operations of linear attention share: where sequences and states are, gates, and one chunk in plain torch.

A state is a matrix S of keys by values. A token decays it and adds a row: S <- diag(exp(g)) S + k^T d, o = q S.
The gated delta rule (Yang et al. 2024) adds d = beta (v - k S), a state space model (Dao and Gu 2024) d = dt v.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

CHUNK = 64  # tokens whose products are taken together in a prompt, as in transformers


class Sequences(NamedTuple):
    """Which tokens are one sequence, which row of the pools of states it has, and how far it has come.

    slots: (S,) integers, rows of the pools. A negative one is idle: it gives zeros, and nothing is kept.
    positions: (S,) integers, tokens seen before this call. At 0 the pools are not read: states are zero.
    spans: (S, 2) integers, in order: a sequence's first token and the one behind its last, of the call's tokens row by
    row. Tokens of no sequence give zeros. Without spans each row is a sequence.
    longest: tokens that a sequence has at most, where spans may reach over rows. Without it, those of a row.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    spans: torch.Tensor | None = None
    longest: int | None = None

    def each(self, tokens: int) -> Iterator[tuple[int, int, int, int]]:
        """First token, token behind the last, slot, position of sequences that are not idle. tokens: of a row."""
        count = len(self.slots)
        spans = [(n * tokens, (n + 1) * tokens) for n in range(count)] if self.spans is None else self.spans.tolist()
        for (begin, end), slot, position in zip(spans, self.slots.tolist(), self.positions.tolist(), strict=True):
            if slot >= 0 and end > begin:
                yield begin, end, slot, position


class Decay(NamedTuple):
    """How a head's state decays by a token's `a`: g = -exp(a_log) dt, dt = softplus(a + bias).

    a_log: (heads,). bias: (heads,), or (heads, key channels) where each channel has its own decay.
    lower_bound: with it, g = lower_bound * sigmoid(exp(a_log) (a + bias)).
    limits: between which dt is held. rounded: g, or dt where it scales the values, has the dtype of a.
    """

    a_log: torch.Tensor
    bias: torch.Tensor
    lower_bound: float | None = None
    limits: tuple[float, float] = (0.0, float("inf"))
    rounded: bool = False


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which a reference computes."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gates(a, decay, b, beta_scale):
    """a: (..., heads) or (..., heads, key channels); b: (..., heads) or None.

    Returns g (..., heads, 1 or key channels), and by what the new values are multiplied: beta, or dt without b.
    """
    kind = wide(a.dtype)
    rate = decay.a_log.to(kind).exp().view(-1, *[1] * (decay.bias.dim() - 1))
    if b is None and decay.rounded:
        dt = F.softplus(a + decay.bias.to(a.dtype)).clamp(*decay.limits).to(kind)
    else:
        dt = F.softplus(a.to(kind) + decay.bias.to(kind)).clamp(*decay.limits)
    g = -rate * dt
    if decay.lower_bound is not None:
        g = decay.lower_bound * torch.sigmoid(rate * (a.to(kind) + decay.bias.to(kind)))
    if b is not None and decay.rounded:
        g = g.to(a.dtype).to(kind)
    g = g if decay.bias.dim() == 2 else g.unsqueeze(-1)
    return g, dt if b is None else (b.sigmoid() * beta_scale).to(kind)


def prepared(q, k, v, scale, key_eps):
    """Queries and keys of every value head, in float32: normalized by their length if key_eps is given, queries scaled.

    q, k: (..., key heads, Dk); v: (..., key heads, repeat, Dv). Returns all as (..., heads, D).
    """
    kind = wide(q.dtype)
    q, k = (t.to(kind) for t in (q, k))
    if key_eps is not None:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + key_eps) for t in (q, k))
    q, k = (t.repeat_interleave(v.shape[-2], dim=-2) for t in (q * scale, k))
    return q, k, v.to(kind).flatten(-3, -2)


def chunk(tokens, state, delta):
    """Up to CHUNK tokens at once: o and the new state.

    tokens: q and k (H, T, Dk), v (H, T, Dv), g (H, T, 1 or Dk) and strength (H, T). state: (H, Dk, Dv). delta: by the
    delta rule, whose new values need the inverse of a unit lower triangle ("UT transform"). All in one dtype.
    """
    q, k, v, g, strength = tokens
    total = g.cumsum(1)
    later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    between = (total[:, :, None] - total[:, None]).masked_fill(later[..., None], float("-inf")).exp()

    def products(x):
        if between.shape[-1] == 1:
            return (x @ k.transpose(1, 2)) * between.squeeze(-1)
        return (x[:, :, None] * k[:, None] * between).sum(-1)

    new = v * strength[..., None]
    if delta:
        new = new - strength[..., None] * ((k * total.exp()) @ state)
        system = products(k) * strength[..., None]
        new = torch.linalg.solve_triangular(system, new, upper=False, unitriangular=True)
    out = (q * total.exp()) @ state + products(q) @ new
    last = total[:, -1:]
    return out, state * last.exp().transpose(1, 2) + (k * (last - total).exp()).transpose(1, 2) @ new
