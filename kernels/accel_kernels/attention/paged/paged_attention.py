"""Attention of new tokens over a store: rotate, store keys and values, attend to all that is stored."""

import math
from functools import partial

import torch
import torch.nn.functional as F

from accel_kernels.attention.paged.cases import attention_case, ragged_case
from accel_kernels.device import float8_reason, on_tensor_cores, shared_memory
from accel_kernels.norm import norm as norms
from accel_kernels.op import dtype_reason, make_op


def reference(
    q, k, v, kv, scale, *, cos=None, sin=None, interleaved=False, q_norm=None, k_norm=None, window=None, softcap=None,
    sinks=None, slopes=None, gate=None, gate_activation="sigmoid", norms_after=False, q_scales=None,
    chunked=False, dense=None, skipped=0, bias=None, mask=None,
):  # fmt: skip
    """q: (rows, new, heads, D); k, v: (rows, new, kv heads, D); any strides, the last 1. Gives (rows, new, heads * D).

    Tokens T .. T + new - 1 are added to every row of the store, T = kv.metadata[LENGTH], which the caller moves on.
    With kv.ragged the one row of q holds the new tokens of several sequences, see `Ragged`. cos, sin: (1 or rows, new,
    R / 2), one angle for each pair of the first R channels. Pairs are (i, i + R/2), or with `interleaved` (2 i, 2 i +
    1). q_norm, k_norm: a Norm over D before the rotation; behind it with `norms_after`. q_scales: (rows, new) float32,
    contiguous, of each token's queries. scale: of scores. window: a query at t sees keys above t - window; `chunked`:
    those of its own chunk, the first behind the padding on the left. softcap: scores become softcap * tanh(scores /
    softcap). sinks: (heads,), a score in the softmax with no value. slopes: (heads,), adds slope * key position (ALiBi,
    Press et al. 2022; in a softmax the same as a penalty by distance). bias: (heads, tokens), what is added to the
    score of the key at each position, as T5's; of one new token a row. gate: like q, or one a head, (rows, new, heads,
    1); what comes out is multiplied by its sigmoid (Qiu et al., "Gated Attention", 2025), or softplus by
    `gate_activation`. Keys that kv.padding_mask forbids are not seen; a query that sees none gives zeros. mask: (rows
    or 1, 1, new, T + new) bool, the keys that each query sees, in place of order, window and padding; not in a graph;
    with kv.ragged, of its only sequence. dense: a PromptAttention that the calls of a model share, for prompts without
    past. k, v: None where an earlier call with the same kv has stored the new tokens; q then has those behind the first
    `skipped`. Of a store in 8 bits, queries see the rounded ones, their own token's too, however many come at once.
    """
    if gate is not None:
        given = {"cos": cos, "sin": sin, "interleaved": interleaved, "q_norm": q_norm, "k_norm": k_norm,
                 "window": window, "softcap": softcap, "sinks": sinks, "slopes": slopes, "norms_after": norms_after,
                 "q_scales": q_scales, "chunked": chunked, "skipped": skipped, "bias": bias, "mask": mask}  # fmt: skip
        out = reference(q, k, v, kv, scale, **given).unflatten(-1, (q.shape[2], -1))
        return (out * _gated(gate, gate_activation)).flatten(2)
    if kv.ragged is not None:
        given = {"interleaved": interleaved, "q_norm": q_norm, "k_norm": k_norm, "window": window, "softcap": softcap,
                 "sinks": sinks, "slopes": slopes, "norms_after": norms_after, "chunked": chunked,
                 "bias": bias, "mask": mask}  # fmt: skip
        return _by_sequence(q, k, v, kv, scale, {"cos": cos, "sin": sin, "q_scales": q_scales}, given)
    if kv.last is not None:
        behind = (torch.arange(q.shape[1], device=q.device) > kv.last).view(1, -1, 1, 1)
        q, k, v = (None if t is None else t.masked_fill(behind, 0) for t in (q, k, v))
    if not norms_after:
        q, k = _normed(q, q_norm), _normed(k, k_norm)
    if cos is not None and k is None:
        q = rotated(q, cos, sin, interleaved)
    elif cos is not None:
        q, k = rotated(torch.cat((q, k), dim=2), cos, sin, interleaved).split([q.shape[2], k.shape[2]], dim=2)
    if norms_after:
        q, k = _normed(q, q_norm), _normed(k, k_norm)
    if q_scales is not None:
        q = (q * q_scales[..., None, None]).to(q.dtype)
    start = kv.stored() + skipped
    end = start + q.shape[1]
    if k is not None:
        kv.write(start, k, v)
    keys, values = kv.read(end, q.dtype)
    all_seen = window is None and kv.padding_mask is None and q.shape[1] == 1
    seen = mask
    if mask is None and not (all_seen and softcap is None and sinks is None and slopes is None and bias is None):
        seen = seen_keys(q, end, start, kv.padding_mask, window, chunked)
    return masked_attention(q, keys, values, seen, scale, softcap, sinks, slopes, bias)


def masked_attention(q, keys, values, seen, scale, softcap, sinks, slopes, bias=None):
    """seen: as `seen_keys` gives it, None for all. keys, values: as `KV.read` gives them."""
    if softcap is None and sinks is None and slopes is None and bias is None:
        return standard_attention(q, keys, values, seen, scale)
    return _attention(q, keys, values, seen, scale, softcap, sinks, slopes, bias)


def _gated(gate, activation):
    if activation == "sigmoid":
        return gate.sigmoid()
    return F.softplus(gate if gate.dtype == torch.float64 else gate.float()).to(gate.dtype)


def _normed(t, norm):
    return t if norm is None else norms.reference(t, norm)


def _by_sequence(q, k, v, kv, scale, by_token, given):
    """Each sequence of a `Ragged` by itself; zeros for what fills the call up."""
    out = q.new_zeros(1, q.shape[1], q.shape[2] * q.shape[3])
    for new, alone in kv.sequences():
        mine = {name: t if t is None else t[:, new] for name, t in by_token.items()}
        new_q, new_k, new_v = (None if t is None else t[:, new] for t in (q, k, v))
        out[:, new] = reference(new_q, new_k, new_v, alone, scale, **mine, **given)
    return out


def seen_keys(q, end, start, padding_mask, window, chunked=False):
    """(rows or 1, 1, new, end): which keys a query sees."""
    at = torch.arange(end, device=q.device)
    seen = at <= at[start:, None]
    if chunked:
        mask = None if padding_mask is None else padding_mask[:, :end].bool()
        first = 0 if mask is None else (mask.cumsum(1) == 0).sum(1)[:, None, None, None]
        seen = seen & ((at - first) // window == (at[start:, None] - first) // window)
        return seen[None, None] if mask is None else seen & mask[:, None, None]
    if window is not None:
        seen = seen & (at > at[start:, None] - window)
    return seen[None, None] if padding_mask is None else seen & padding_mask[:, None, None, :end].bool()


def standard_attention(q, keys, values, seen, scale):
    """Torch's own attention; a query that sees no key gives zeros."""
    q, keys, values = (t.transpose(1, 2) for t in (q, keys.to(q.dtype), values.to(q.dtype)))
    if seen is not None and q.is_cuda:  # a kernel that takes both a mask and groups keeps all scores
        keys, values = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (keys, values))
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, scale=scale, enable_gqa=True)
    if seen is not None:
        out = out.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return out.transpose(1, 2).flatten(2)


def _attention(q, keys, values, seen, scale, softcap, sinks, slopes, bias):
    """What torch's own does not know, written out, in fp32 or fp64."""
    rows, new, heads, _ = q.shape
    groups = heads // keys.shape[2]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys, values = (t.to(wide).repeat_interleave(groups, dim=2).transpose(1, 2) for t in (keys, values))
    scores = q.to(wide).transpose(1, 2) @ keys.transpose(-1, -2) * scale  # (rows, heads, new, end)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores + slopes.to(wide).view(-1, 1, 1) * torch.arange(keys.shape[2], device=q.device)
    if bias is not None:
        scores = scores + bias[:, None, : keys.shape[2]].to(wide)
    scores = scores.masked_fill(~seen, -math.inf)
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks.to(wide).view(-1, 1, 1))
    weights = torch.exp(scores - top.masked_fill(top == -math.inf, 0.0))
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.to(wide).view(-1, 1, 1) - top)
    out = weights @ values / total.masked_fill(total == 0, 1.0)
    return out.transpose(1, 2).reshape(rows, new, -1).to(q.dtype)


def rotated(t: torch.Tensor, cos, sin, interleaved: bool, parts: int = 1) -> torch.Tensor:
    """(rows, new, heads, D), of which the first channels turn, as `rotated_heads` says; rounded once."""
    wide = torch.float64 if t.dtype == torch.float64 else torch.float32
    cos, sin = (a.to(wide).unsqueeze(2) for a in (cos, sin))
    half = cos.shape[-1]
    turns, rest = t[..., : 2 * half].to(wide), t[..., 2 * half :]
    if not interleaved:
        turns, cos, sin = (a.unflatten(-1, (parts, a.shape[-1] // parts)) for a in (turns, cos, sin))
    first, second = (turns[..., ::2], turns[..., 1::2]) if interleaved else turns.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1).flatten(-2)
    rotated = rotated.to(t.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def supports(
    q, k, v, kv, scale, *, cos=None, sin=None, interleaved=False, q_norm=None, k_norm=None, window=None, softcap=None,
    sinks=None, slopes=None, gate=None, gate_activation="sigmoid", norms_after=False, q_scales=None,
    chunked=False, dense=None, skipped=0, bias=None, mask=None,
) -> str | None:  # fmt: skip
    if q.numel() == 0:
        return "empty"
    if q.shape[-1] > 512:
        return f"head dimension {q.shape[-1]}, more than 512"
    if q.is_cuda and q.shape[-1] > 256 and not on_tensor_cores(q) and shared_memory(q.device) < 88 * 1024:
        return f"head dimension {q.shape[-1]}, for which this GPU has too little shared memory"
    if v is not None and v.shape[-1] != q.shape[-1]:
        return f"values of {v.shape[-1]} channels, keys of {q.shape[-1]}"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor is not None and tensor.stride(-1) != 1:
            return f"{name}: channels not next to each other"
    if (kv.key_scales is None and kv.keys.dtype != q.dtype) or any(
        t is not None and t.dtype != q.dtype for t in (k, v)
    ):
        return "queries and stored keys of different dtypes"
    if (reason := float8_reason(q.device, kv.keys.dtype)) is not None:
        return reason
    if kv.ragged is not None and (q.shape[0] != 1 or kv.padding_mask is not None):
        return "sequences of different lengths in several rows, or with a padding mask"
    if kv.ragged is not None and (q.shape[2] // kv.keys.shape[2] > 128 or skipped):
        return f"{q.shape[2] // kv.keys.shape[2]} heads a group, more than 128, of sequences of different lengths"
    if gate is not None and (reason := _gate_reason(q, gate)) is not None:
        return reason
    if bias is not None and (q.shape[1] != 1 or skipped or kv.ragged is not None or slopes is not None):
        return "a bias of more than one new token a row, or beside slopes"
    if bias is not None and (bias.dim() != 2 or bias.shape[0] != q.shape[2] or not bias.is_contiguous()):
        return "a bias of another form than (heads, tokens)"
    if q_scales is not None and (q_scales.shape != q.shape[:2] or not q_scales.is_contiguous()):
        return "factors of queries of another form than (rows, new)"
    for norm in (q_norm, k_norm):
        if norm is not None and (norm.centered or norm.bias is not None or norm.weight is None):
            return "a query or key norm with a mean or bias, or without a weight"
    return dtype_reason(q, k, v, cos, sin, sinks, slopes, gate, q_scales, bias, products=q.shape[1] > 1)


def _gate_reason(q, gate) -> str | None:
    """Why a gate cannot be read where the output is written."""
    if gate.shape not in (q.shape, (*q.shape[:3], 1)) or gate.dtype != q.dtype:
        return "a gate of another shape or dtype than the queries"
    if gate.shape[3] > 1 and gate.stride(-1) != 1:
        return "gate: channels not next to each other"
    rows, new = gate.shape[:2]
    if rows > 1 and new > 1 and gate.stride(0) != new * gate.stride(1):
        return "gate: tokens not evenly spaced"
    return None


INT8, FP8 = {"kv_dtype": torch.int8}, {"kv_dtype": torch.float8_e4m3fn}
NORM_AFTER = {"qk_norm": True, "norms_after": True, "q_scales": True}
_small, _ragged = partial(attention_case, small=True), partial(ragged_case, small=True)
_large, _large_ragged = partial(attention_case, block=64), partial(ragged_case, block=64)
_llama, _llama_ragged = (partial(one, heads=32, kv_heads=8, dim=128, rotary=128) for one in (_large, _large_ragged))
CASES = (
    _small("decode", 1, 37, 1, 4, 2, 32, rotary=32),
    _small("decode-mha-odd", 2, 21, 1, 3, 3, 20, rotary=10),
    _small("decode-mqa-interleaved", 2, 50, 1, 4, 1, 64, rotary=32, interleaved=True),
    _small("decode-partial", 2, 37, 1, 4, 2, 32, rotary=16, qk_norm=True),
    _small("decode-partial-interleaved", 1, 37, 1, 3, 3, 20, rotary=8, interleaved=True),
    _small("decode-valid", 3, 33, 1, 4, 2, 32, rotary=32, padding_mask=True, shuffled=True),
    _small("decode-hidden", 2, 21, 1, 4, 2, 32, padding_mask=True, hole=21),
    _small("decode-full-blocks", 2, 48, 1, 4, 2, 32, shuffled=True),
    _small("decode-many-shares", 1, 200, 1, 2, 1, 32),
    _small("decode-window", 1, 60, 1, 4, 2, 32, window=11),
    _small("decode-window-across", 1, 57, 1, 4, 2, 32, window=11),
    _small("decode-softcap", 1, 30, 1, 2, 2, 32, softcap=5.0),
    _small("decode-sinks", 2, 30, 1, 4, 2, 32, sinks=True),
    _small("decode-slopes", 1, 30, 1, 4, 4, 32, slopes=True),
    _small("decode-bias", 2, 70, 1, 4, 2, 32, bias=90, padding_mask=True),
    _small("decode-bias-odd", 1, 21, 1, 3, 3, 20, bias=22, softcap=5.0),
    _small("decode-qk-norm", 1, 30, 1, 4, 2, 32, rotary=32, qk_norm=True),
    _small("decode-first", 1, 0, 1, 4, 2, 32, rotary=32, room=200),
    _small("decode-gate", 2, 37, 1, 4, 2, 32, rotary=32, qk_norm=True, gate=True, padding_mask=True),
    _small("decode-gate-odd", 1, 21, 1, 3, 3, 20, gate=True, softcap=5.0),
    _small("verify", 1, 37, 5, 4, 2, 32, rotary=32, shuffled=True),
    _small("prefill", 2, 0, 23, 4, 2, 32, rotary=32),
    _small("prefill-valid", 3, 0, 23, 4, 2, 32, rotary=32, padding_mask=True),
    _small("prefill-filled", 2, 0, 23, 4, 2, 32, rotary=32, last=18),
    _small("prefill-filled-norm", 1, 0, 20, 4, 2, 20, rotary=10, qk_norm=True, interleaved=True, last=0),
    _small("prefill-window", 1, 0, 40, 2, 2, 32, window=7),
    _small("prefill-mask", 2, 0, 23, 4, 2, 32, rotary=32, qk_norm=True, window=7, mask=23),
    _small("prefill-more-mask", 2, 19, 23, 4, 2, 40, softcap=5.0, gate=True, shuffled=True, mask=42),
    _small("prefill-softcap", 1, 0, 40, 2, 1, 64, rotary=64, window=30, softcap=50.0),
    _small("prefill-more", 1, 19, 23, 4, 2, 40, rotary=40, window=30),
    _small("prefill-more-window", 1, 19, 23, 4, 2, 32, window=5),
    _small("prefill-all", 2, 9, 20, 4, 2, 32, sinks=True, slopes=True, softcap=4.0, padding_mask=True),
    _small("prefill-gate", 2, 0, 23, 4, 2, 32, rotary=16, qk_norm=True, gate=True),
    _small("prefill-gate-more", 2, 19, 5, 3, 3, 20, window=11, gate=True, shuffled=True),
    _small("borrowed-decode", 2, 37, 1, 4, 2, 32, rotary=32, borrowed=True, shuffled=True),
    _small("borrowed-decode-window", 1, 64, 1, 4, 2, 32, window=17, padding_mask=True, borrowed=True),
    _small("borrowed-decode-partial", 1, 15, 1, 4, 2, 32, rotary=16, window=16, borrowed=True),
    _small("borrowed-prefill", 2, 0, 23, 4, 2, 32, rotary=32, last=18, borrowed=True),
    _small("borrowed-prefill-end", 2, 0, 1, 4, 2, 32, rotary=32, window=9, skipped=22, borrowed=True),
    _small("borrowed-verify-end", 1, 19, 3, 4, 1, 32, rotary=32, skipped=14, padding_mask=True, borrowed=True),
    _small("int8-borrowed-decode", 2, 37, 1, 4, 2, 32, rotary=32, window=20, borrowed=True, **INT8),
    _small("decode-512", 1, 37, 1, 4, 1, 272, rotary=272),
    _small("prefill-512", 1, 0, 19, 4, 2, 512, rotary=512, padding_mask=True),
    _small("int8-decode-gate", 1, 37, 1, 4, 2, 32, rotary=32, gate=True, **INT8),
    _small("int8-decode", 2, 37, 1, 4, 2, 32, rotary=32, padding_mask=True, shuffled=True, **INT8),
    _small("int8-decode-odd", 1, 21, 1, 3, 3, 20, rotary=10, window=9, sinks=True, **INT8),
    _small("int8-decode-first", 1, 0, 1, 4, 1, 32, softcap=3.0, slopes=True, **INT8),
    _small("int8-verify", 1, 37, 5, 4, 2, 32, rotary=32, shuffled=True, **INT8),
    _small("int8-prefill-filled", 2, 0, 23, 4, 2, 32, rotary=32, last=16, **INT8),
    _small("int8-prefill", 2, 0, 23, 4, 2, 20, rotary=20, interleaved=True, padding_mask=True, **INT8),
    attention_case("fp8-decode", 1, 37, 1, 4, 2, 32, rotary=32, **FP8),
    attention_case("fp8-prefill-more", 1, 19, 23, 4, 2, 32, rotary=32, **FP8),
    _llama("llama-decode", 1, 511, 1),
    _llama("llama-decode-32k", 1, 32767, 1),
    _llama("llama-decode-b32", 32, 1023, 1),
    _llama("llama-decode-8k-int8", 8, 8191, 1, **INT8),
    _llama("llama-decode-8k-fp8", 8, 8191, 1, **FP8),
    _large("int8-decode-valid", 2, 317, 1, 8, 2, 128, rotary=128, padding_mask=True, shuffled=True, **INT8),
    _large("int8-borrowed-decode-mha", 3, 190, 1, 3, 3, 64, padding_mask=True, borrowed=True, **INT8),
    _large("int8-borrowed-decode-turned", 2, 900, 1, 8, 2, 128, rotary=128, window=300, borrowed=True, **INT8),
    _large("int8-decode-window", 1, 900, 1, 14, 2, 64, window=300, sinks=True, **INT8),
    _large("int8-decode-partial", 1, 317, 1, 8, 2, 128, rotary=64, **INT8),
    _large("int8-decode-interleaved", 2, 190, 1, 8, 2, 128, rotary=128, interleaved=True, **INT8),
    _large("int8-decode-softcap", 2, 190, 1, 8, 1, 128, softcap=5.0, slopes=True, **INT8),
    _large("int8-decode-qk-norm", 1, 64, 1, 3, 3, 64, rotary=64, qk_norm=True, **INT8),
    _large(
        "int8-decode-norm-after", 2, 190, 1, 3, 3, 64, rotary=64, qk_norm=True, norms_after=True, q_scales=True, **INT8
    ),
    _llama("llama-prefill-int8", 1, 0, 700, **INT8),
    _llama("llama-prefill", 1, 0, 2048),
    _llama("llama-prefill-filled", 1, 0, 704, last=661),
    _llama("llama-prefill-filled-rows", 2, 0, 256, last=200, window=256),
    _llama("llama-prefill-filled-int8", 1, 0, 704, last=661, **INT8),
    _large("qwen-prefill", 2, 0, 190, 14, 2, 64, rotary=64),
    _large("qwen-prefill-valid", 2, 0, 190, 14, 2, 64, rotary=64, window=100, padding_mask=True),
    _large("phi-prefill-80", 1, 0, 150, 8, 8, 80, rotary=32, padding_mask=True),
    _large("prefill-96-filled", 1, 0, 320, 6, 2, 96, rotary=96, last=290),
    _large("prefill-odd-filled", 1, 0, 320, 6, 2, 100, rotary=50, last=290),
    _large("gemma2-prefill", 1, 0, 300, 8, 4, 256, rotary=256, window=100, softcap=50.0),
    _large("gemma2-prefill-more", 1, 130, 170, 8, 4, 256, rotary=256, window=100, softcap=50.0),
    _large("qwen3.5-decode", 1, 900, 1, 16, 2, 256, rotary=64, qk_norm=True, gate=True),
    _large("qwen3.5-prefill", 1, 0, 700, 16, 2, 256, rotary=64, qk_norm=True, gate=True),
    _llama("afmoe-decode-int8", 1, 900, 1, gate=True, **INT8),
    _llama("llama-prefill-more", 1, 1000, 700),
    _large("gemma2-decode", 2, 700, 1, 8, 4, 256, rotary=256, window=512, softcap=50.0),
    _large("phi-decode-80", 3, 300, 1, 32, 32, 80, rotary=32, padding_mask=True),
    _ragged("ragged-decode", [(37, 1), (0, 1), (16, 1), (90, 1)], 4, 2, 32, rotary=32, idle=2, fill=2),
    _ragged("ragged-decode-odd", [(21, 1), (4, 1)], 3, 3, 20, rotary=20, qk_norm=True, window=9),
    _ragged("ragged-interleaved", [(21, 1), (50, 1), (8, 6)], 6, 2, 32, rotary=16, interleaved=True),
    _ragged("ragged-partial", [(21, 1), (50, 1)], 4, 1, 32, rotary=16, idle=1, fill=1),
    _ragged("ragged-mixed", [(37, 1), (60, 1), (0, 23), (16, 9), (5, 1)], 4, 2, 32, rotary=32),
    _ragged("ragged-mixed-idle", [(9, 1), (0, 40)], 2, 1, 32, rotary=32, idle=3, fill=9, softcap=5.0),
    _ragged("ragged-many-decodes", [*[(i % 7, 1) for i in range(20)], (0, 9), (3, 12)], 4, 1, 16, rotary=16),
    _ragged("ragged-prefill", [(0, 17), (33, 30)], 14, 2, 16, rotary=16, qk_norm=True, window=20),
    _ragged("ragged-mask", [(0, 17)], 4, 2, 32, rotary=32, mask=17),
    _ragged("ragged-none", [], 2, 1, 32, rotary=32, idle=2, fill=4),
    _ragged("ragged-all", [(9, 1), (30, 20)], 4, 4, 32, sinks=True, slopes=True, softcap=4.0),
    _ragged("ragged-gate", [(37, 1), (60, 1), (0, 23), (5, 3)], 4, 2, 32, rotary=32, qk_norm=True, gate=True, fill=2),
    _ragged("ragged-borrowed", [(37, 1), (60, 1), (0, 23), (5, 3)], 4, 2, 32, rotary=32, window=18, borrowed=True),
    _ragged("ragged-norm-after", [(37, 1), (60, 1), (0, 23)], 4, 2, 32, rotary=32, **NORM_AFTER),
    _ragged("ragged-int8", [(37, 1), (0, 23), (5, 3)], 4, 2, 32, rotary=32, fill=2, **INT8),
    ragged_case("ragged-fp8", [(37, 1), (9, 23)], 4, 2, 64, rotary=64, **FP8),
    _large_ragged("ragged-int8-decode", [(317, 1), (64, 1), (9, 1)], 8, 2, 128, rotary=128, idle=5, fill=5, **INT8),
    _large("gemma4-decode", 1, 900, 1, 8, 1, 512, rotary=512, qk_norm=True),
    _large("gemma4-prefill", 1, 0, 700, 8, 1, 512, rotary=512, qk_norm=True),
    _large("gemma4-borrowed-decode", 2, 900, 1, 8, 2, 256, rotary=256, window=512, borrowed=True),
    _large("gemma4-borrowed-prefill", 1, 0, 300, 8, 2, 256, rotary=256, window=200, borrowed=True),
    _large("gemma4-borrowed-end", 1, 0, 1, 8, 2, 512, rotary=512, skipped=700, borrowed=True),
    _llama_ragged("ragged-llama", [*[(100 * i, 1) for i in range(20)], (0, 700), (64, 300)], idle=4, fill=4),
    _large_ragged("ragged-gemma2", [(700, 1), (0, 300)], 8, 4, 256, rotary=256, window=512, softcap=50.0),
    _large_ragged("ragged-phi-80", [(300, 1), (20, 150)], 32, 32, 80, rotary=32),
    _small("decode-norm-after", 2, 30, 1, 4, 2, 32, rotary=32, **NORM_AFTER),
    _small("prefill-norm-after", 2, 9, 20, 4, 2, 20, rotary=10, **NORM_AFTER),
    _small("decode-chunked", 3, 57, 1, 4, 2, 32, window=11, chunked=True, padding_mask=True, hole=40),
    _small("prefill-chunked", 3, 19, 23, 4, 2, 32, window=11, chunked=True, padding_mask=True, hole=40),
    _small("decode-softplus", 2, 37, 1, 4, 2, 32, rotary=32, gate=1, gate_activation="softplus"),
    _small("prefill-softplus", 2, 19, 5, 3, 3, 20, gate=20, gate_activation="softplus"),
    _ragged("ragged-chunked", [(37, 1), (60, 1), (0, 23), (9, 7)], 4, 2, 32, rotary=32, window=11, chunked=True),
    _ragged("ragged-softplus", [(37, 1), (60, 1), (0, 23)], 4, 2, 32, gate=1, gate_activation="softplus"),
)

paged_attention = make_op("paged_attention", reference, supports, CASES)
