"""Attention inside each of several sequences that lie one behind another in one row of tokens, without padding."""

import math
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F

from accel_kernels.op import dtype_reason, make_op, random_cases


def reference(
    q, k, v, starts, scale, *, longest, window=None, bias=None, causal=False, slopes=None, keys=None, padding=None,
    by_query=None, by_key=None, places=None,
):  # fmt: skip
    """q: (T, heads, D); k, v: (T, kv heads, D); any strides, the last 1. Gives (T, heads * D).

    starts: (sequences + 1,) int32 contiguous, rising from 0: sequence i holds the tokens from starts[i] to below
    starts[i + 1], which may be none. Zeros come out for the tokens from starts[-1] on, which fill the call up. The
    kernel reads starts before the kernel in front has ended: that must not be what writes them. longest: the number of
    tokens that no sequence exceeds; the kernel's tiles follow it, as long as they do a graph serves all lengths.
    scale: of the scores, positive. window: (left, right), how many tokens a query sees before and behind itself.
    causal: it sees none behind itself. bias: (heads, 2 R + 1) contiguous, bias[h, clamp(j - i, -R, R) + R] is added to
    the score of query i and key j. slopes: (heads,), slope * |i - j| is taken from it (ALiBi, both ways). keys:
    (sequences,) int32 contiguous, how many tokens at the beginning of each sequence are seen, or None for all; a query
    that sees none gives zeros. padding: (sequences,) int32 contiguous, with keys: to the query behind these all are
    alike, and it sees itself so many times: it stands for so many rows that a mask hides all from. places: (2 R + 1,)
    int32 contiguous; with c = places[clamp(j - i, -R, R) + R], scale * (by_query[i, h, c] + by_key[j, h, c]) is added
    to the score; both (T, heads, columns), the last next to each other.
    The reference waits for the GPU to learn the lengths.
    """
    out = q.new_zeros(q.shape[0], q.shape[1] * q.shape[2])
    begins = starts.tolist()
    lengths = [end - first for first, end in pairwise(begins)]
    firsts: dict[tuple[int, ...], list[int]] = {}
    told = (lengths if one is None else one.tolist() for one in (keys, padding))
    for first, *sizes in zip(begins, lengths, *told, strict=False):
        firsts.setdefault(tuple(sizes), []).append(first)
    for length, seen, times in firsts:
        if not seen:
            continue
        at = torch.tensor(firsts[length, seen, times], device=q.device)
        tokens = at[:, None] + torch.arange(length, device=q.device)
        queries = q[tokens].transpose(1, 2)
        theirs, values = (t[tokens[:, :seen]].transpose(1, 2) for t in (k, v))
        mask = None
        distances = (window, bias, slopes, places)
        if any(one is not None for one in distances) or (causal and seen < length):
            mask = _mask(length, q, window, bias, causal, slopes)[..., :seen]
        if places is not None:
            mask = _relative(by_query[tokens], by_key[tokens], places, scale)[..., :seen] + (
                0 if mask is None else mask
            )
        given = {"attn_mask": mask, "is_causal": causal and mask is None, "enable_gqa": q.shape[1] != k.shape[1]}
        found = F.scaled_dot_product_attention(queries, theirs, values, scale=scale, **given)
        if mask is not None:
            found = found.masked_fill((mask == -math.inf).all(-1)[..., None], 0.0)
        if padding is not None:
            alike = (values.sum(2, keepdim=True) + times * v[tokens[:, seen:]].transpose(1, 2)) / (seen + times)
            found[:, :, seen:] = alike.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        out[tokens] = found.transpose(1, 2).flatten(2)
    return out


def _mask(length, q, window, bias, causal, slopes):
    """What is added to the scores of one sequence, (1 or heads, length, length)."""
    at = torch.arange(length, device=q.device)
    distance = at - at[:, None]  # of key j from query i
    added = q.new_zeros(1, length, length)
    if bias is not None:
        reach = bias.shape[1] // 2
        added = added + bias[:, distance.clamp(-reach, reach) + reach].to(q.dtype)
    if slopes is not None:
        added = added - (slopes[:, None, None] * distance.abs()).to(q.dtype)
    left, right = window or (length, length)
    return added.masked_fill((distance < -left) | (distance > (0 if causal else right)), -math.inf)


def _relative(by_query, by_key, places, scale):
    """What is added to scores, (sequences, heads, length, length); of tables (sequences, length, heads, columns)."""
    at, reach = torch.arange(by_query.shape[1], device=places.device), places.numel() // 2
    columns = places[(at - at[:, None]).clamp(-reach, reach) + reach].long()
    mine, theirs = (t.transpose(1, 2) for t in (by_query, by_key))
    given = theirs.gather(-1, columns.t().expand(*theirs.shape[:3], -1)).transpose(-1, -2)
    return scale * (mine.gather(-1, columns.expand(*mine.shape[:3], -1)) + given)


def supports(
    q, k, v, starts, scale, *, longest, window=None, bias=None, causal=False, slopes=None, keys=None, padding=None,
    by_query=None, by_key=None, places=None,
) -> str | None:  # fmt: skip
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or (q.shape[0], q.shape[2]) != (k.shape[0], k.shape[2]):
        return f"queries {tuple(q.shape)}, keys {tuple(k.shape)}, values {tuple(v.shape)}"
    if q.numel() == 0 or starts.numel() < 2:
        return "empty"
    if q.shape[1] % k.shape[1]:
        return f"{q.shape[1]} heads over {k.shape[1]} heads of keys"
    if q.shape[2] > (256 if q.dtype != torch.float32 else 128):
        return f"head dimension {q.shape[2]}, too many for {q.dtype}"
    if not (q.dtype == k.dtype == v.dtype):
        return "queries, keys and values of several dtypes"
    if any(t.stride(2) != 1 for t in (q, k, v)):
        return "channels not next to each other"
    if longest * max(t.stride(0) for t in (q, k, v)) >= 2**31:
        return "a sequence that spans more than 2^31 numbers"
    if starts.dtype != torch.int32 or not starts.is_contiguous() or starts.device != q.device:
        return "starts that are not contiguous int32 on the device of the queries"
    if keys is not None and (keys.dtype != torch.int32 or keys.shape != (starts.numel() - 1,)):
        return "keys that are not one int32 for each sequence"
    if padding is not None and (keys is None or causal or window is not None):
        return "rows of padding without keys, or that do not see all"
    if padding is not None and (padding.dtype != torch.int32 or padding.shape != keys.shape):
        return "padding that is not one int32 for each sequence"
    if scale <= 0 or (window is not None and min(window) < 0):
        return "a scale that is not positive, or a window that hides a token from itself"
    if bias is not None and (bias.shape[0] != q.shape[1] or bias.shape[1] % 2 == 0 or not bias.is_contiguous()):
        return f"a bias {tuple(bias.shape)} that is not (heads, an odd number) and contiguous"
    if slopes is not None and (slopes.shape != q.shape[1:2] or not slopes.is_contiguous()):
        return "slopes that are not one for each head"
    if places is not None and (places.dtype != torch.int32 or places.numel() % 2 == 0 or not places.is_contiguous()):
        return "places that are not an odd number of int32 and contiguous"
    if places is not None and bias is not None and places.numel() != bias.shape[1]:
        return "a bias and places that reach to different distances"
    if places is not None and any(t.shape[:2] != q.shape[:2] or t.stride(2) != 1 for t in (by_query, by_key)):
        return "tables of distances that are not (tokens, heads, columns)"
    return dtype_reason(q, k, v, bias, slopes, by_query, by_key, products=True)


@random_cases
def _case(
    rand, lengths, heads, kv_heads, dim, *, fill=0, idle=0, longest=None, reach=None, slopes=False, seen=None,
    padding=None, columns=None, **more
):  # fmt: skip
    """fill: tokens of infinities behind the sequences. idle: sequences of no tokens at the end. reach: R of a bias.
    seen: keys of each sequence. padding: what the query behind them stands for. columns: of tables of distances.
    """
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    starts += starts[-1:] * idle
    qkv = rand(starts[-1] + fill, (heads + 2 * kv_heads) * dim)
    qkv[starts[-1] :] = float("inf")
    q, k, v = (t.unflatten(-1, (-1, dim)) for t in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], -1))
    if reach is not None:
        more["bias"] = rand(heads, 2 * reach + 1, dtype=torch.float32)
    if slopes:
        more["slopes"] = rand.uniform(heads)
    if seen is not None:
        more["keys"] = torch.tensor(seen + [0] * idle, device=rand.device, dtype=torch.int32)
    if padding is not None:
        more["padding"] = torch.tensor(padding + [0] * idle, device=rand.device, dtype=torch.int32)
    if columns is not None:
        more |= {name: rand(heads, starts[-1] + fill, columns).transpose(0, 1) for name in ("by_query", "by_key")}
        more["places"] = torch.arange(columns - 1, device=rand.device, dtype=torch.int32)
    more["longest"] = longest or max(lengths)
    return (q, k, v, torch.tensor(starts, device=rand.device, dtype=torch.int32), dim**-0.5), more


_small = partial(_case, small=True)
MIXED = [10 + 490 * (i * 37 % 64) // 63 for i in range(64)]  # each of 64 lengths from 10 to 500 once
CASES = (
    _small("odd", [37, 5, 0, 70, 1], 4, 4, 32, fill=9, idle=2),
    _small("one", [150], 2, 1, 64),
    _small("keys", [40, 70, 9, 100], 2, 2, 32, seen=[33, 70, 0, 1], idle=1, fill=3),
    _small("keys-window", [90, 33], 2, 1, 16, seen=[20, 33], window=(5, 7)),
    _small("keys-behind", [70, 33, 5], 2, 1, 16, seen=[40, 33, 2], window=(0, 128), reach=4),
    _small("window", [90, 33], 2, 2, 32, window=(5, 5), fill=3, longest=128),
    _small("bias", [40, 1, 75], 3, 3, 20, reach=8),
    _small("short-causal", [16, 3, 0, 9], 4, 2, 40, causal=True, fill=20),
    _small("wide-window", [300, 21], 1, 1, 16, window=(100, 40), reach=3, slopes=True),
    _small("causal", [100, 131], 2, 1, 24, causal=True, idle=1),
    _small("slopes", [20, 45, 8], 3, 1, 72, slopes=True),
    _small("causal-window", [180], 1, 1, 16, causal=True, window=(30, 9)),
    _small("relative", [70, 3, 21], 2, 2, 16, columns=40, seen=[60, 3, 21], fill=5, idle=1),
    _small("alike", [71, 3, 20], 2, 1, 20, seen=[70, 3, 19], padding=[9, 0, 60], columns=40, reach=19, fill=5, idle=1),
    _small("none", [0, 0], 2, 2, 16, longest=32, fill=5),
    _small("many", [2, 0, 1] * 86, 1, 1, 16, fill=1),
    _case("bge-base", MIXED, 12, 12, 64, fill=64),
    _case("bge-m3", MIXED, 16, 16, 64, idle=8),
    _case("minilm", MIXED, 12, 12, 32),
    _case("queries", [16] * 64, 12, 12, 64),
    _case("siglip", [729] * 8, 16, 16, 72),
    _case("qwen-tower", [256, 4096, 1000], 16, 16, 80),
    _case("qwen-windows", [64] * 70, 16, 16, 80, longest=4480),  # which the host does not know the lengths of
    _case("modernbert", MIXED, 12, 12, 64, window=(64, 64), longest=512),
    _case("t5", MIXED, 12, 12, 64, reach=128),
    _case("jina", MIXED, 12, 12, 64, slopes=True),
    _case("gemma", MIXED, 3, 1, 256, window=(256, 256), longest=512),
    _case("qwen-embedding", [1000, 7, 300], 16, 8, 128, causal=True, fill=30),
    _case("deberta", MIXED, 12, 12, 64, columns=512),
    _case("deberta-padded", MIXED, 12, 12, 64, columns=512, seen=[one - 1 for one in MIXED], padding=[7] * 64),
    _case("wide", [500, 77], 4, 2, 96),
)

packed_attention = make_op("packed_attention", reference, supports, CASES)
