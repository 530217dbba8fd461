"""Calls of the attention over latents, which tests and benchmarks run."""

import torch

from accel_kernels.attention.paged.cases import Stores, ragged_of
from accel_kernels.attention.paged.kv import KV, metadata_of
from accel_kernels.attention.paged.kv_quantization import rounded
from accel_kernels.norm.norm import Norm
from accel_kernels.op import random_cases


class LatentNumbers(Stores):
    """Random stores of latents and arguments of calls."""

    def store(self, rows, columns, block, rank, rope, shuffled, kv_dtype=None) -> KV:
        table = self.table(rows, columns, shuffled)
        latents = self(rows * columns, block, 1, rank + rope)
        if kv_dtype is not None:
            (codes, scales), shared = rounded(latents[..., :rank], kv_dtype), latents[..., rank:].contiguous()
            metadata = metadata_of(columns, [(table, codes, shared, scales)], table.device)
            return KV(codes, shared, table, None, metadata, 0, key_scales=scales)
        return KV(latents, latents[..., :rank], table, None, metadata_of(columns, [(table, latents)], table.device), 0)

    def call(self, kv, rows, new, heads, nope, values, rank, rope, rotates, more, behind=None):
        """behind: the first new token that does not count, which is an infinity."""
        kv = kv._replace(split_counters=torch.zeros(rows * new * heads, device=self.device, dtype=torch.int32))
        q, compressed = self(rows, new, heads * (nope + rope)), self(rows, new, 16 + rank + rope)[..., 16:]
        if behind is not None:
            q[:, behind:], compressed[:, behind:] = float("inf"), float("inf")
        up = self(heads, nope + values, rank, spread=rank**-0.5)
        given = {"norm": Norm(self(rank, spread=0.3, mean=1.0), None, 1e-6), **more}
        if rotates:
            given |= self.turning(rows, new, rope)
        return (q.unflatten(-1, (heads, -1)), compressed, kv, up, (nope + rope) ** -0.5), given


def _latent_case(numbers, rows, stored, new, *, heads=4, nope=16, values=12, rank=32, rope=8, block=16, room=None,
                 padding_mask=False, hole=1, shuffled=False, last=None, rotates=True, kv_dtype=None,
                 **more):  # fmt: skip
    """Rows of `stored` tokens each, and `new` more. hole: a token of the first row that a padding mask hides."""
    columns = -(-(room or stored + new) // block)
    kv = numbers.store(rows, columns, block, rank, rope, shuffled, kv_dtype)
    kv = numbers.filled(kv, stored, new, padding_mask, hole, last)
    behind = None if last is None else last + 1
    return numbers.call(kv, rows, new, heads, nope, values, rank, rope, rotates, more, behind)


def _ragged_case(numbers, sequences, *, heads=4, nope=16, values=12, rank=32, rope=8, block=16, rotates=True, idle=0,
                 fill=0, kv_dtype=None, **more):  # fmt: skip
    """As `ragged_of`; tokens that fill the call up are of infinities."""
    columns = -(-max((sum(one) for one in sequences), default=1) // block)
    kv = numbers.store(len(sequences) + 1, columns, block, rank, rope, True, kv_dtype)
    kv = kv._replace(ragged=ragged_of(sequences, idle, fill, numbers.device))
    used = sum(new for _, new in sequences)
    return numbers.call(kv, 1, used + fill, heads, nope, values, rank, rope, rotates, more, used)


latent_case, ragged_latent_case = (random_cases(make, LatentNumbers) for make in (_latent_case, _ragged_case))
