"""Calls of the attention over latents, which tests and benchmarks run."""

import torch

from accel_kernels.attention.paged.kv import KV, LENGTH, PADDING_MASK, metadata_of
from accel_kernels.norm.norm import Norm
from accel_kernels.op import random_cases


@random_cases
def latent_case(rand, rows, stored, new, *, heads=4, nope=16, values=12, rank=32, rope=8, block=16, room=None,
                padding_mask=False, hole=1, shuffled=False, last=None, rotates=True, **more):  # fmt: skip
    """Rows of `stored` tokens each, and `new` more. hole: a token of the first row that a padding mask hides."""
    columns = -(-(room or stored + new) // block)
    blocks = rows * columns
    order = torch.arange(blocks, device="cpu")
    if shuffled:
        order = torch.randperm(blocks, generator=rand.generator, device="cpu")
    table = order.view(rows, columns).to(rand.device, torch.int32)
    latents = rand(blocks, block, 1, rank + rope)
    kv = KV(latents, latents[..., :rank], table, None, metadata_of(columns, [(table, latents)], table.device), 0)
    mask = None
    if padding_mask:  # left padding of row r by r tokens
        tokens = torch.arange(columns * block, device="cpu")
        mask = tokens >= torch.arange(rows, device="cpu").unsqueeze(1)
        mask[0, hole] = stored + new < 3
        mask = mask.to(rand.device)
    kv.metadata[LENGTH], kv.metadata[PADDING_MASK] = stored, 0 if mask is None else mask.data_ptr()
    kv = kv._replace(padding_mask=mask, is_prefill=stored == 0)
    q, compressed = rand(rows, new, heads * (nope + rope)), rand(rows, new, 16 + rank + rope)[..., 16:]
    if last is not None:
        kv = kv._replace(last=torch.tensor([last], device=rand.device), by_address=True)
        q[:, last + 1 :], compressed[:, last + 1 :] = float("inf"), float("inf")
    up = rand(heads, nope + values, rank, spread=rank**-0.5)
    given = {"norm": Norm(rand(rank, spread=0.3, mean=1.0), None, 1e-6), **more}
    if rotates:
        angles = rand.uniform(rows, new, rope // 2) * 6.28
        given["cos"], given["sin"] = angles.cos().to(rand.dtype), angles.sin().to(rand.dtype)
    return (q.unflatten(-1, (heads, -1)), compressed, kv, up, (nope + rope) ** -0.5), given
