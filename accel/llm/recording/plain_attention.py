"""Attention as it is written down, for a few tokens."""

from typing import Any

import torch


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Attention in fp32 or fp64 with a mask that is added to the scores. Returns (rows, tokens, heads, D)."""
    groups = query.shape[1] // key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    key, value = (t.to(wide).repeat_interleave(groups, dim=1) for t in (key, value))
    scores = query.to(wide) @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask.to(wide)
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.to(wide).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[-2]]
    return (weights @ value).transpose(1, 2).to(query.dtype).contiguous()  # as that of transformers: some take views
