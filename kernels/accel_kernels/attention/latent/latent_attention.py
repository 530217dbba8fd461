"""Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024) of new tokens over a store of latents."""

from functools import partial

import torch

from accel_kernels.attention.latent.cases import latent_case, ragged_latent_case
from accel_kernels.attention.paged.paged_attention import rotated, seen_keys, standard_attention
from accel_kernels.device import float8_reason, shared_memory
from accel_kernels.norm import norm as norms
from accel_kernels.op import dtype_reason, make_op


def reference(
    q, compressed, kv, up, scale, *, norm, cos=None, sin=None, interleaved=False, to_halves=False, dense=None
):  # fmt: skip
    """Norms and stores the new latents, and attends to all that is stored. Gives (rows, new, heads * V).

    q: (rows, new, heads, N + P); compressed: (rows, new, R + P), the latent and the part of the key that all heads
    share; any strides, the last 1. up: (heads, N + V, R) contiguous, the product that makes a head's key and value of
    a latent. The key of a head is its N channels and the P shared ones, of which queries and keys are rotated.
    kv: its keys are (blocks, block, 1, R + P), a token's normed latent and rotated part, and its values their first R
    channels, a view. Or keys are codes of latents, (blocks, block, 1, R), with kv.key_scales, one a token, and values
    are the rotated parts, (blocks, block, 1, P); new tokens are attended to as they are stored. New tokens are those
    behind kv.metadata[LENGTH], which the caller moves on. With kv.ragged the one row of q holds the new tokens of
    several sequences, see `Ragged`.
    norm: an RMS norm over R. cos, sin: (1 or rows, new, P / 2), or None for no rotation. Pairs are (i, i + P/2), or
    with `interleaved` (2 i, 2 i + 1); with `to_halves` besides, rotated ones are stored as (i, i + P/2). scale: of the
    scores. Keys that kv.padding_mask forbids are not seen; a query that sees none gives zeros. dense: a PromptAttention
    that the calls of a model share.
    """
    rank = up.shape[-1]
    rope = compressed.shape[-1] - rank
    nope = q.shape[-1] - rope
    if kv.ragged is not None:
        out = q.new_zeros(1, q.shape[1], up.shape[0] * (up.shape[1] - nope))
        given = {"norm": norm, "interleaved": interleaved, "to_halves": to_halves}
        for new, alone in kv.sequences():
            angles = {} if cos is None else {"cos": cos[:, new], "sin": sin[:, new]}
            out[:, new] = reference(q[:, new], compressed[:, new], alone, up, scale, **angles, **given)
        return out
    if kv.last is not None:
        behind = (torch.arange(q.shape[1], device=q.device) > kv.last).view(1, -1, 1)
        q, compressed = q.masked_fill(behind.unsqueeze(-1), 0), compressed.masked_fill(behind, 0)
    latent = norms.reference(compressed[..., :rank], norm)
    turning = torch.cat((q[..., nope:], compressed[..., None, rank:]), dim=2)
    if cos is not None:
        turning = rotated(turning, cos, sin, interleaved)
        if to_halves:
            turning = torch.cat((turning[..., ::2], turning[..., 1::2]), dim=-1)
    parts = latent.unsqueeze(2), turning[:, :, -1:]
    start = kv.stored()
    end = start + q.shape[1]
    kv.write(start, *(parts if kv.key_scales is not None else (torch.cat(parts, dim=-1), parts[0])))
    stored, shared = kv.read(end, q.dtype)
    shared = (stored[..., rank:] if kv.key_scales is None else shared).expand(-1, -1, up.shape[0], -1)
    expanded = torch.einsum("btr,hcr->bthc", stored[:, :, 0, :rank], up)
    keys = torch.cat((expanded[..., :nope], shared), dim=-1)
    queries = torch.cat((q[..., :nope], turning[:, :, :-1]), dim=-1)
    all_seen = kv.padding_mask is None and q.shape[1] == 1
    seen = None if all_seen else seen_keys(q, end, start, kv.padding_mask, None)
    return standard_attention(queries, keys, expanded[..., nope:], seen, scale)


def supports(
    q, compressed, kv, up, scale, *, norm, cos=None, sin=None, interleaved=False, to_halves=False, dense=None
) -> str | None:  # fmt: skip
    if q.numel() == 0:
        return "empty"
    rank = up.shape[-1]
    rope = compressed.shape[-1] - rank
    if not (16 <= rank <= 512 and 0 < rope <= 64):
        return f"latents of {rank} channels and {rope} shared ones, not 16 to 512 and 1 to 64"
    if rank > 256 and q.is_cuda and shared_memory(q.device) < 96 * 1024:
        return "latents of more than 256 channels, for which this GPU has too little shared memory"
    if max(q.shape[-1] - rope, up.shape[1] - (q.shape[-1] - rope)) > 256:
        return "more than 256 channels of a head's keys or values"
    if cos is not None and 2 * cos.shape[-1] != rope:
        return f"{2 * cos.shape[-1]} of {rope} shared channels rotated"
    if q.stride(-1) != 1 or compressed.stride(-1) != 1 or not up.is_contiguous():
        return "channels not next to each other"
    if not (q.dtype == compressed.dtype == up.dtype == kv.values.dtype):
        return "queries, latents and the weight of different dtypes"
    if (reason := float8_reason(q.device, kv.keys.dtype)) is not None:
        return reason
    if kv.ragged is not None and (q.shape[0] != 1 or kv.padding_mask is not None):
        return "sequences of different lengths in several rows, or with a padding mask"
    if norm.centered or norm.bias is not None or norm.weight is None:
        return "a norm with a mean or bias, or without a weight"
    return dtype_reason(q, compressed, up, cos, sin, norm.weight, products=q.shape[1] > 1)


V2_LITE = {"heads": 16, "nope": 128, "values": 128, "rank": 512, "rope": 64, "interleaved": True, "block": 64}
GLM_FLASH = V2_LITE | {"heads": 20, "nope": 192, "values": 256, "to_halves": True}
MINICPM3 = {"heads": 40, "nope": 64, "values": 64, "rank": 256, "rope": 32, "block": 64}
V3 = V2_LITE | {"heads": 128, "to_halves": True}
_small, _ragged = partial(latent_case, small=True), partial(ragged_latent_case, small=True)
CASES = (
    _small("decode", 1, 37, 1, interleaved=True),
    _small("decode-odd", 2, 21, 1, heads=3, nope=5, values=7, rank=20, rope=6),
    _small("decode-to-halves", 3, 60, 1, interleaved=True, to_halves=True, shuffled=True),
    _small("decode-first", 1, 0, 1, heads=20, room=200, rotates=False),
    _small("decode-valid", 3, 33, 1, padding_mask=True, shuffled=True),
    _small("decode-hidden", 2, 21, 1, padding_mask=True, hole=21),
    _small("decode-many-rows", 70, 5, 1, heads=2),
    _small("decode-int8", 3, 60, 1, interleaved=True, to_halves=True, shuffled=True, kv_dtype=torch.int8),
    _small("decode-int8-odd", 2, 21, 1, heads=3, nope=5, values=7, rank=20, rope=6, kv_dtype=torch.int8),
    _small("verify-int8-valid", 2, 30, 16, heads=3, padding_mask=True, kv_dtype=torch.int8),
    _small("prefill-int8-filled", 2, 0, 23, last=18, kv_dtype=torch.int8),
    _small("prefill-int8-more", 1, 19, 70, heads=3, interleaved=True, kv_dtype=torch.int8),
    _small("verify", 1, 37, 5, heads=5, shuffled=True, interleaved=True),
    _small("verify-valid", 2, 30, 16, heads=3, padding_mask=True),
    _small("prefill-few", 2, 0, 7, interleaved=True, to_halves=True),
    _small("prefill", 2, 0, 23, interleaved=True, to_halves=True),
    _small("prefill-wide-values", 1, 0, 19, values=40, rotates=False),
    _small("prefill-valid", 3, 0, 23, padding_mask=True),
    _small("prefill-filled", 2, 0, 23, last=18),
    _small("prefill-few-filled", 2, 0, 12, last=4, interleaved=True),
    _small("prefill-more", 1, 19, 70, heads=3, interleaved=True),
    _small("prefill-more-filled", 2, 19, 40, last=31, padding_mask=True),
    _ragged("ragged-decode", [(37, 1), (0, 1), (16, 1), (90, 1)], idle=2, fill=2, interleaved=True),
    _ragged("ragged-decode-wide", [(21, 1), (4, 1)], heads=20, rotates=False),
    _ragged("ragged-mixed", [(37, 1), (60, 1), (0, 23), (16, 9), (5, 1)], heads=3, interleaved=True, to_halves=True),
    _ragged("ragged-mixed-int8", [(37, 1), (0, 23), (16, 9)], heads=3, idle=2, fill=3, kv_dtype=torch.int8),
    _ragged("ragged-mixed-idle", [(9, 1), (0, 70)], idle=3, fill=9),
    _ragged("ragged-none", [], idle=2, fill=4),
    latent_case("v2-lite-decode", 1, 2047, 1, **V2_LITE),
    latent_case("v2-lite-decode-b8", 8, 2047, 1, **V2_LITE),
    latent_case("v2-lite-decode-32k", 1, 32767, 1, **V2_LITE),
    latent_case("v2-lite-decode-32k-b8", 8, 32767, 1, **V2_LITE),
    latent_case("v2-lite-decode-int8", 1, 2047, 1, kv_dtype=torch.int8, **V2_LITE),
    latent_case("v2-lite-decode-fp8", 1, 2047, 1, kv_dtype=torch.float8_e4m3fn, **V2_LITE),
    latent_case("v2-lite-decode-32k-int8", 1, 32767, 1, kv_dtype=torch.int8, **V2_LITE),
    latent_case("v2-lite-decode-32k-int8-b8", 8, 32767, 1, kv_dtype=torch.int8, **V2_LITE),
    latent_case("v2-lite-prefill-int8", 1, 0, 2048, kv_dtype=torch.int8, **V2_LITE),
    latent_case("v2-lite-prefill-int8-more", 1, 1000, 300, kv_dtype=torch.int8, **V2_LITE),
    latent_case("v2-lite-decode-valid", 3, 300, 1, padding_mask=True, shuffled=True, **V2_LITE),
    latent_case("v2-lite-decode-b160", 160, 150, 1, **V2_LITE),
    latent_case("v2-lite-verify", 2, 1000, 5, shuffled=True, **V2_LITE),
    latent_case("v2-lite-prefill", 1, 0, 2048, **V2_LITE),
    latent_case("v2-lite-prefill-filled", 1, 0, 320, last=290, **V2_LITE),
    latent_case("v2-lite-prefill-more", 1, 1000, 300, **V2_LITE),
    latent_case("v2-lite-prefill-valid", 2, 0, 190, padding_mask=True, **V2_LITE),
    latent_case("glm-flash-decode", 1, 2047, 1, **GLM_FLASH),
    latent_case("glm-flash-decode-b8", 8, 2047, 1, **GLM_FLASH),
    latent_case("glm-flash-decode-32k", 1, 32767, 1, **GLM_FLASH),
    latent_case("glm-flash-prefill", 1, 0, 2048, **GLM_FLASH),
    latent_case("glm-flash-prefill-more", 1, 700, 130, **GLM_FLASH),
    latent_case("minicpm3-decode", 2, 900, 1, **MINICPM3),
    latent_case("minicpm3-prefill-more", 1, 100, 70, **MINICPM3),
    ragged_latent_case("ragged-v2-lite-decode", [(317, 1), (64, 1), (9, 1)], fill=5, **V2_LITE),
    ragged_latent_case("ragged-v2-lite", [*[(100 * i, 1) for i in range(20)], (0, 300), (64, 200)], fill=4, **V2_LITE),
    ragged_latent_case("ragged-glm-flash", [(700, 1), (0, 90)], **GLM_FLASH),
    latent_case("v3-decode", 1, 2047, 1, **V3),
    latent_case("v3-decode-b8", 8, 2047, 1, **V3),
)

latent_attention = make_op("latent_attention", reference, supports, CASES)
