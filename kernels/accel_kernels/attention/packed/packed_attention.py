"""Attention over sequences of different lengths that stand one behind another, without padding between them."""

from itertools import pairwise

import torch


def packed_attention(
    q, k, v, starts, scale, *, longest, window=None, bias=None, causal=False, slopes=None, keys=None
):  # the kernel takes this place
    """q: (T, heads, D); k, v: (T, kv heads, D). starts: (sequences + 1,) int32. Returns (T, heads * D).

    Tokens behind starts[-1], and those that see no key, give zeros. longest: a bound of the lengths, for the host.
    window: (left, right), how far a token sees; None for all. keys: (sequences,) int32, how many tokens at the
    beginning of each sequence are seen; None for all.
    """
    if bias is not None or causal or slopes is not None:
        raise NotImplementedError
    out = q.new_zeros(q.shape)
    ends = starts.tolist()
    seen = [b - a for a, b in pairwise(ends)] if keys is None else keys.tolist()
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    for (first, end), count in zip(pairwise(ends), seen, strict=False):
        if not count:
            continue
        mine, theirs, values = q[first:end], k[first : first + count], v[first : first + count]
        scores = torch.einsum("qhd,khd->hqk", mine.float(), theirs.float()) * scale
        hidden = None
        if window is not None:
            distance = torch.arange(count, device=q.device) - torch.arange(end - first, device=q.device)[:, None]
            hidden = (distance < -window[0]) | (distance > window[1])
            scores = scores.masked_fill(hidden, float("-inf"))
        weights = scores.softmax(-1)
        weights = weights if hidden is None else weights.nan_to_num(0.0)
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, values.float()).to(q.dtype)
    return out.flatten(1)
