"""Calls of the attention over a store, which tests and benchmarks run."""

import torch

from accel_kernels.attention.paged.kv import KV, LENGTH, PADDING_MASK, metadata_of
from accel_kernels.attention.paged.kv_quantization import rounded
from accel_kernels.attention.paged.ragged import Ragged
from accel_kernels.norm.norm import Norm
from accel_kernels.op import Random, random_cases


class Stores(Random):
    """What random stores of any kind share."""

    def table(self, rows: int, columns: int, shuffled: bool) -> torch.Tensor:
        """(rows, columns) int32, the place of each block."""
        count = torch.arange(rows * columns, device="cpu")
        order = torch.randperm(len(count), generator=self.generator, device="cpu") if shuffled else count
        return order.view(rows, columns).to(self.device, torch.int32)

    def turning(self, rows: int, new: int, channels: int) -> dict[str, torch.Tensor]:
        """Cosines and sines of so many channels that turn."""
        angles = self.uniform(rows, new, channels // 2) * 6.28
        return {"cos": angles.cos().to(self.dtype), "sin": angles.sin().to(self.dtype)}

    def filled(self, kv: KV, stored: int, new: int, padding_mask: bool, hole: int, last: int | None) -> KV:
        """Of rows of `stored` tokens each; with a mask, left padding of row r by r tokens, and a hole in the first."""
        rows, places, mask = kv.table.shape[0], kv.table.shape[1] * kv.keys.shape[1], None
        if padding_mask:
            mask = torch.arange(places, device="cpu") >= torch.arange(rows, device="cpu").unsqueeze(1)
            mask[0, hole] = stored + new < 3
            mask = mask.to(self.device)
        kv.metadata[LENGTH], kv.metadata[PADDING_MASK] = stored, 0 if mask is None else mask.data_ptr()
        kv = kv._replace(padding_mask=mask, is_prefill=stored == 0)
        if last is None:
            return kv
        return kv._replace(last=torch.tensor([last], device=self.device), by_address=True)


class Numbers(Stores):
    """Random stores and arguments of calls."""

    def store(self, rows: int, columns: int, block: int, heads: int, dim: int, shuffled: bool, kv_dtype) -> KV:
        """Full of keys and values; kv_dtype: the 8-bit dtype they are rounded to, or None."""
        table = self.table(rows, columns, shuffled)
        keys, values = (self(rows * columns, block, heads, dim) for _ in range(2))
        key_scales = value_scales = None
        if kv_dtype is not None:
            (keys, key_scales), (values, value_scales) = (rounded(t, kv_dtype) for t in (keys, values))
            key_scales, value_scales = (t.mT.contiguous().mT for t in (key_scales, value_scales))
        kept = [t for t in (table, keys, values, key_scales, value_scales) if t is not None]
        metadata = metadata_of(columns, [kept], table.device)
        return KV(keys, values, table, None, metadata, 0, key_scales=key_scales, value_scales=value_scales)

    def given(self, rows: int, new: int, heads: int, dim: int, rotary, qk_norm: bool, more: dict) -> dict:
        """The keywords of a call. rotary: channels that turn, or None."""
        given = dict(more)
        if rotary:
            given |= self.turning(rows, new, rotary)
        if qk_norm:
            given["q_norm"], given["k_norm"] = Norm(self(dim), None, 1e-6), Norm(self(dim), None, 1e-6)
        if given.get("q_scales"):
            given["q_scales"] = self.uniform(rows, new).float() + 0.5
        for one in ("sinks", "slopes"):
            if given.get(one):
                given[one] = (self.uniform(heads) - 0.5).to(self.dtype)
        if given.get("mask"):  # of so many keys
            given["mask"] = self.uniform(rows, 1, new, given["mask"]) > 0.5
            given["mask"][0, :, 1] = False
        if given.get("bias"):
            given["bias"] = self(heads, given["bias"])
        return given


def beside(q: torch.Tensor, gate: bool | int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Queries, and the gate that stands behind each head of them in one projection, (rows, new, 2 heads, D).

    gate: True, or how many of a head's numbers there are.
    """
    if not gate:
        return q, None
    q, found = q.unflatten(2, (-1, 2)).unbind(3)
    return q, found if gate is True else found[..., :gate]


def _attention_case(numbers, rows, stored, new, heads, kv_heads, dim, *, rotary=None, block=16, room=None,
                   padding_mask=False, hole=1, shuffled=False, qk_norm=False, kv_dtype=None, last=None,
                   gate=False, borrowed=False, **more):  # fmt: skip
    """Rows of `stored` tokens and `new` more. hole: a hidden token of the first row. borrowed: new ones are stored."""
    columns = -(-(room or stored + new + more.get("skipped", 0)) // block)
    kv = numbers.store(rows, columns, block, kv_heads, dim, shuffled, kv_dtype)
    kv = numbers.filled(kv, stored, new, padding_mask, hole, last)
    q_heads = heads * (1 + bool(gate))
    both = numbers(rows, new, (q_heads + 2 * kv_heads) * dim)
    if last is not None:
        both[:, last + 1 :] = float("inf")
    q, k, v = (t.unflatten(-1, (-1, dim)) for t in both.split([q_heads * dim, kv_heads * dim, kv_heads * dim], -1))
    q, more["gate"] = beside(q, gate)
    k, v = (None, None) if borrowed else (k, v)
    return (q, k, v, kv, dim**-0.5), numbers.given(rows, new, heads, dim, rotary, qk_norm, more)


def ragged_of(sequences: list[tuple[int, int]], idle: int, fill: int, device: torch.device) -> Ragged:
    """Sequences (tokens stored, new tokens); sequence i has row `len(sequences)` - i, row 0 is of none.

    idle: more decodes and prefills that the launch has room for. fill: tokens that fill the call up.
    """
    news = [new for _, new in sequences]
    first = next((i for i, new in enumerate(news) if new > 1), len(news))
    prefills = len(news) - first + idle if idle or first < len(news) else 0
    size = first + idle + prefills
    starts = [sum(news[:i]) for i in range(len(news) + 1)]

    def filled(values, length, filler):
        return torch.tensor([*values, *[filler] * (length - len(values))], device=device, dtype=torch.int32)

    return Ragged(
        filled(starts, size + 1, sum(news)),
        filled([stored for stored, _ in sequences], size, 7),
        filled([len(news) - i for i in range(len(news))], size, 0),
        filled([i for i, new in enumerate(news) for _ in range(new)], sum(news) + fill, -1),
        filled([first, len(news)], 2, 0),
        first + idle, prefills,
    )  # fmt: skip


def _ragged_case(numbers, sequences, heads, kv_heads, dim, *, idle=0, fill=0, rotary=None, block=16, qk_norm=False,
                 kv_dtype=None, gate=False, borrowed=False, **more):  # fmt: skip
    """As `ragged_of`; tokens that fill the call up are of infinities."""
    columns = -(-max((sum(one) for one in sequences), default=1) // block)
    kv = numbers.store(len(sequences) + 1, columns, block, kv_heads, dim, True, kv_dtype)
    used = sum(new for _, new in sequences)
    q_heads = heads * (1 + bool(gate))
    both = numbers(1, used + fill, q_heads + 2 * kv_heads, dim)
    both[:, used:] = float("inf")
    q, k, v = both.split([q_heads, kv_heads, kv_heads], dim=2)
    q, more["gate"] = beside(q, gate)
    k, v = (None, None) if borrowed else (k, v)
    kv = kv._replace(ragged=ragged_of(sequences, idle, fill, numbers.device))
    return (q, k, v, kv, dim**-0.5), numbers.given(1, used + fill, heads, dim, rotary, qk_norm, more)


attention_case, ragged_case = (random_cases(make, Numbers) for make in (_attention_case, _ragged_case))
