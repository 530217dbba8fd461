"""What operations of linear attention share: where sequences and states are, gates, and one chunk in plain torch.

A state is a matrix S of keys by values. A token decays it and adds a row: S <- diag(exp(g)) S + k^T d, o = q S.
The gated delta rule (Yang et al. 2024) adds d = beta (v - k S), a state space model (Dao and Gu 2024) d = dt v.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from accel_kernels.attention.paged.kv import HALF, LENGTH
from accel_kernels.attention.paged.ragged import Ragged

CHUNK = 64  # tokens whose products are taken together in a prompt, as in transformers


class Sequences(NamedTuple):
    """Which tokens are one sequence, which row of the pools of states it has, and how far it has come.

    slots: (S,) integers, rows of the pools. A negative one is idle: it gives zeros, and nothing is kept. Or (S, 2): the
    row that is read, and that which is written in its place, so that the call may be repeated.
    positions: (S,) integers, tokens seen before this call. At 0 the pools are not read: states are zero.
    spans: (S, 2) integers, in order: a sequence's first token and the one behind its last, of the call's tokens row by
    row. Tokens of no sequence give zeros. Without spans each row is a sequence.
    longest: tokens that a sequence has at most, where spans may reach over rows. Without it, those of a row.
    metadata: as of `RowStates`, by which kernels find the pools; None where they lie as they are given. layer: there.
    limited: (S,) integers, the position from which on `Decay.limits` do not hold; None where they do everywhere.
    padded, other_state, other_window: what `RowSequences` has.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    spans: torch.Tensor | None = None
    longest: int | None = None
    metadata: torch.Tensor | None = None
    layer: int = 0
    limited: torch.Tensor | None = None
    padded: bool = False
    other_state: None = None
    other_window: None = None

    @property
    def number(self) -> int:
        return len(self.slots)

    def pools(self, pool: torch.Tensor, other: None) -> tuple[torch.Tensor, torch.Tensor]:
        """That which is read, and that which is written."""
        return pool, pool

    def pointers(self) -> tuple:
        """The first arguments of `sequence_of` in kernels."""
        return self.spans, self.pairs.contiguous(), self.positions, self.metadata, self.layer, None

    @property
    def pairs(self) -> torch.Tensor:
        """(S, 2): the row of the pools that is read, and that which is written."""
        return self.slots if self.slots.dim() == 2 else self.slots.unsqueeze(1).expand(-1, 2)

    def each(self, tokens: int) -> Iterator[tuple[int, int, int, int, int, int]]:
        """First token, token behind the last, slot, position of sequences that are not idle, 0, and the slot to write.

        tokens: of a row.
        """
        spans = [(n * tokens, (n + 1) * tokens) for n in range(self.number)]
        spans = spans if self.spans is None else self.spans.tolist()
        pairs = self.pairs.tolist()
        for (begin, end), (slot, written), position in zip(spans, pairs, self.positions.tolist(), strict=True):
            if slot >= 0 and end > begin:
                yield begin, end, slot, position, 0, written


class RowSequences(NamedTuple):
    """Sequences that are the rows of a call, with the states of the same rows: what `RowStates.sequences` gives.

    Operations take it like `Sequences`. number: of rows. spans, longest, limited: what `Sequences` has. The other
    fields are those of `RowStates`.
    """

    number: int
    metadata: torch.Tensor
    layer: int
    last: torch.Tensor | None = None
    padded: bool = False
    firsts: torch.Tensor | None = None
    other_state: torch.Tensor | None = None
    other_window: torch.Tensor | None = None
    spans: None = None
    longest: None = None
    limited: None = None

    def pools(self, pool: torch.Tensor, other: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `Sequences`. other: the other half."""
        pair = (pool, pool if other is None else other)
        half = int(self.metadata[HALF])
        return pair[half], pair[1 - half]

    def pointers(self) -> tuple:
        """The first arguments of `sequence_of` in kernels."""
        return None, None, None, self.metadata, self.layer, self.last

    def each(self, tokens: int) -> Iterator[tuple[int, int, int, int, int, int]]:
        """As `Sequences.each`. The last but one is the position of the row's first token: at it states are zero."""
        stored = int(self.metadata[LENGTH])
        end = tokens if self.last is None else min(int(self.last) + 1, tokens)
        firsts = self.firsts.tolist() if self.padded and self.firsts is not None else [0] * self.number
        for row, first in enumerate(firsts):
            begin = max(first - stored, 0)
            if begin < end:
                yield row * tokens + begin, row * tokens + end, row, stored + begin, first, row


class RowStates(NamedTuple):
    """Where the states of one layer lie, row by row, as operations of linear attention take it.

    Like `KV`: on the GPU found by address through `metadata`, as a graph outlives the store it was captured with.

    state: (rows, ...) float32, or None. window: (rows, taps, C), or None: the input of position p lies at p % taps.
    other_state, other_window: their other half. A call reads one half and writes the other, so that it may be repeated,
        or taken back, until HALF in metadata says that the other is read. None where it is written in place.
    metadata: as of `KV`, int64; of its addresses of this layer the first four are those of state and window, twice.
    layer: its place in metadata.
    is_prefill: the host knows that nothing was stored before this call.
    last: int64 (1,), the index of the last new token that counts; None where all do.
    padded: whether any row may begin with padding; such tokens do not count either.
    firsts: (rows,) int64 on the device, tokens of padding before each row's first one. Kernels find it by address, and
        take it for zeros where that is 0; the reference needs it if `padded`.

    ragged: the sequences of a call in which they have different lengths, and which rows of state and window are theirs;
        None where the rows of the call are those of the states. With it the fields from `is_prefill` on say nothing.

    Of tokens that do not count zeros come out, and nothing is kept of them. Nothing older than a row's first token is
    ever read. Kernels may read states before the kernel in front has ended (`programmatic`): between two calls of
    one layer there must be another kernel, as that which moves the LENGTH on.
    """

    state: torch.Tensor | None
    window: torch.Tensor | None
    metadata: torch.Tensor
    layer: int
    is_prefill: bool = False
    last: torch.Tensor | None = None
    padded: bool = False
    firsts: torch.Tensor | None = None
    other_state: torch.Tensor | None = None
    other_window: torch.Tensor | None = None
    ragged: Ragged | None = None

    def sequences(self) -> RowSequences | Sequences:
        """What operations take beside state and window; all sequences, with limits everywhere."""
        if self.ragged is not None:
            return self._some(slice(None))._replace(limited=None)
        kept = self.window if self.state is None else self.state
        if kept is None:
            raise ValueError("neither a state nor a window")
        others = self.other_state, self.other_window
        return RowSequences(kept.shape[0], self.metadata, self.layer, self.last, self.padded, self.firsts, *others)

    def decodes(self, ragged: Ragged) -> Sequences:
        """Of `ragged` those of one token each, for the first tokens of the call."""
        return self._some(slice(ragged.most_decodes))._replace(spans=None, limited=None)

    def prefills(self, ragged: Ragged) -> Sequences:
        """The others."""
        assert ragged.states is not None
        return self._some(slice(len(ragged.states.slots) - ragged.most_prefills, None))

    def _some(self, places: slice) -> Sequences:
        assert self.ragged is not None and self.ragged.states is not None
        slots, positions, spans, prompts = (one[places] for one in self.ragged.states)
        return Sequences(slots, positions, spans, None, self.metadata, self.layer, prompts)


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
    # In float32 differences of large sums would be off by as much as the sums are; of channels there are too many.
    total = g.cumsum(1, dtype=torch.float64 if g.shape[-1] == 1 else g.dtype)
    later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    between = (total[:, :, None] - total[:, None]).masked_fill(later[..., None], float("-inf")).to(q.dtype).exp()
    past, until = (one.to(q.dtype).exp() for one in (total, total[:, -1:] - total))

    def products(x):
        if between.shape[-1] == 1:
            return (x @ k.transpose(1, 2)) * between.squeeze(-1)
        return (x[:, :, None] * k[:, None] * between).sum(-1)

    new = v * strength[..., None]
    if delta:
        new = new - strength[..., None] * ((k * past) @ state)
        system = products(k) * strength[..., None]
        new = torch.linalg.solve_triangular(system, new, upper=False, unitriangular=True)
    out = (q * past) @ state + products(q) @ new
    return out, state * past[:, -1:].transpose(1, 2) + (k * until).transpose(1, 2) @ new
