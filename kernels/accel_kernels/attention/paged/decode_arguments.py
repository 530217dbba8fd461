"""What the two kernels of a decode step, over keys and values in 16 bits or 8, take alike."""

from typing import Any, NamedTuple

import torch

from accel_kernels.attention.paged.kv import KV
from accel_kernels.attention.paged.split_kv import Scratch
from accel_kernels.norm.norm import kernel_arguments


class Heads(NamedTuple):
    """The heads of one new token: (rows, 1, heads, D), and the steps from row to row and from head to head."""

    data: torch.Tensor
    row: int
    head: int


class Angles(NamedTuple):
    """cos and sin of the rotation, or None, and the steps from row to row and from pair to pair of channels."""

    cos: torch.Tensor | None
    sin: torch.Tensor | None
    row: int = 0
    pair: int = 0


def decode_arguments(
    q, k, v, out, kv: KV, scale: float, scratch: Scratch, splits: int, few_splits: int, *, cos=None, sin=None,
    q_norm=None, k_norm=None, window=None, softcap=None, sinks=None, slopes=None,
) -> tuple[tuple, dict[str, Any]]:  # fmt: skip
    """Arguments in the order of both kernels, and the constants that both have."""
    heads, kv_heads = q.shape[2], k.shape[2]
    angles = Angles(None, None)
    if cos is not None:
        angles = Angles(cos, sin, cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(2))
    arguments = (
        *(Heads(t, t.stride(0), t.stride(2)) for t in (q, k, v)), out, angles, kernel_arguments(q_norm)[0],
        kernel_arguments(k_norm)[0], scratch, sinks, slopes, kv.metadata,
        None if kv.ragged is None else kv.ragged.pointers(), kv.layer, heads, kv_heads, float(scale),
        window, None if softcap is None else float(softcap), splits, few_splits,
    )  # fmt: skip
    constants = {
        "GROUP": heads // kv_heads, "DIM": q.shape[-1], "PAIRS": 0 if cos is None else cos.shape[-1],
        "Q_NORM": q_norm is not None, "K_NORM": k_norm is not None, "HAS_PADDING_MASK": kv.padding_mask is not None,
        "SPLIT": splits > 1,
    }  # fmt: skip
    return arguments, constants
