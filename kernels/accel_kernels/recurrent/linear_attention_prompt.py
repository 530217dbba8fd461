"""Many tokens of linear attention, in chunks on tensor cores.

Gated delta rule: Yang et al. 2024, with a decay of each channel Kimi Linear 2025; state space: Dao and Gu 2024.
"""

import torch

from accel_kernels.device import Feature, lacks, shared_memory
from accel_kernels.op import make_op, random_cases
from accel_kernels.recurrent.causal_convolution import some_rows, some_sequences
from accel_kernels.recurrent.linear_attention_step import LIGHTNING, SPACE, gate_arguments, state_reason
from accel_kernels.recurrent.recurrence import CHUNK, chunk, gates, prepared
from accel_kernels.sizes import cdiv


def reference(
    q, k, v, a, decay, state, sequences, *, scale, b=None, beta_scale=1.0, key_eps=None, skip=None, dtype=None,
):  # fmt: skip
    """q, k: (B, T, key heads, Dk); v: (B, T, key heads, repeat, Dv); a: like v without Dv, or with Dk.

    q, k and v are what comes out of the convolution. Any strides, the last one 1. Gives (B, T, heads, Dv).
    The other arguments are those of `linear_attention_step`; state is read where a sequence goes on, and written.
    """
    batch, tokens, key_heads, repeat, value_dim = v.shape
    out = v.new_zeros(batch * tokens, key_heads * repeat, value_dim, dtype=dtype)
    q, k, v, a = (t.flatten(0, 1) for t in (q, k, v, a))
    b = None if b is None else b.flatten(0, 1).flatten(1)
    g, strength = gates(a.flatten(1, 2), decay, b, beta_scale)
    if sequences.limited is not None:
        free = gates(a.flatten(1, 2), decay._replace(limits=(0.0, float("inf"))), b, beta_scale)
        limited = torch.ones(batch * tokens, 1, dtype=torch.bool, device=q.device)
        spans = sequences.spans.tolist()
        for (begin, end), position, until in zip(spans, sequences.positions, sequences.limited, strict=True):
            limited[begin:end, 0] = position + torch.arange(end - begin, device=q.device) < until
        g, strength = torch.where(limited[..., None], g, free[0]), torch.where(limited, strength, free[1])
    q, k, v = prepared(q, k, v, scale, key_eps)
    read, written = sequences.pools(state, sequences.other_state)
    for begin, end, slot, position, first, into in sequences.each(tokens):
        kept = read[slot].to(q.dtype) if position > first else torch.zeros_like(read[slot], dtype=q.dtype)
        for start in range(begin, end, CHUNK):
            part = slice(start, min(end, start + CHUNK))
            tokens_of = [t[part].transpose(0, 1) for t in (q, k, v, g, strength)]
            y, kept = chunk(tokens_of, kept, b is not None)
            y = y.transpose(0, 1)
            out[part] = (y if skip is None else y + skip[:, None] * v[part]).to(out.dtype)
        written[into] = kept.to(state.dtype)
    return out.view(batch, tokens, key_heads * repeat, value_dim)


def supports(
    q, k, v, a, decay, state, sequences, *, scale, b=None, beta_scale=1.0, key_eps=None, skip=None, dtype=None,
) -> str | None:  # fmt: skip
    if (reason := lacks(q.device, Feature.WIDE_PRODUCTS)) is not None:
        return reason
    large = q.dtype == torch.float32 or decay.bias.dim() == 2  # operands are more than registers hold
    if large and (reason := lacks(q.device, Feature.SHARED_OPERANDS)) is not None:
        return f"float32, or decays of channels, on {reason}"
    if q.is_cuda and decay.bias.dim() == 2 and k.shape[-1] <= 16 and q.dtype != torch.float32:
        return "16 keys or fewer in 16 bits, with decays of channels"  # Triton 3.6 reads past the shared memory
    if sequences.limited is not None and (decay.bias.dim() == 2 or sequences.spans is None):
        return "limits up to a position, of decays of channels or without spans"
    if (needed := _shared_bytes(q.dtype, k.shape[-1], decay)) > shared_memory(q.device):
        return f"less than {needed} bytes of shared memory"
    return state_reason(q, k, v, a, decay, state, b)


def _shared_bytes(dtype, key_dim, decay) -> int:
    """What the larger kernel takes, as compiled, and something above it."""
    parts = 1 if decay.bias.dim() == 1 and key_dim <= 128 else 2
    return 36 * 1024 * cdiv(key_dim, 128) * parts * (2 if dtype == torch.float32 else 1)


@random_cases
def _case(rand, batch, tokens, heads, repeat, key_dim, value_dim, positions, *, spans=None, longest=None, skip=False,
          order="qkv", key_eps=1e-6, idle=(), alike=False, stored=None, firsts=None, last=None, apart=False,
          limited=None, **gating):  # fmt: skip
    """alike: all keys are nearly the same, as of a text that repeats itself."""

    channels = (heads * key_dim, heads * key_dim, heads * repeat * value_dim)
    q, k, v = rand(batch, tokens, sum(channels)).split(channels, dim=2)
    if alike:
        k = k[:, :1] + 0.05 * k
    q, k = (t.unflatten(2, (heads, key_dim)) for t in (q, k))
    v = v.unflatten(2, (heads, repeat, value_dim))
    a, decay, more = gate_arguments(rand, (batch, tokens), heads, repeat, key_dim, **gating)
    count = len(positions) if stored is None else batch - 2
    state = rand(count * (1 + apart) + 2, heads * repeat, key_dim, value_dim, dtype=torch.float32)
    if order == "vkq":
        state = state.transpose(2, 3).contiguous().transpose(2, 3)
    if stored is None:
        sequences = some_sequences(rand, count, positions, spans, longest, idle, (state, None) if apart else None)
    else:
        sequences = some_rows(rand, stored, state, None, firsts, last)
    if limited is not None:
        decay = decay._replace(limits=(0.1, 0.3))
        sequences = sequences._replace(limited=torch.tensor(limited, device=rand.device))
    if skip:
        more["skip"] = rand(heads * repeat)
    more |= {"scale": key_dim**-0.5, "key_eps": key_eps}
    return (q, k, v, a, decay, state, sequences), more


CASES = (
    _case("qwen", 2, 70, 1, 2, 32, 32, [0, 5], small=True),
    _case("odd", 1, 131, 1, 1, 20, 28, [9], small=True),
    _case("short", 3, 3, 1, 2, 16, 16, [0, 1, 0], idle=(2,), small=True),
    _case("alike", 1, 64, 1, 1, 32, 16, [0], alike=True, small=True),
    _case("kimi", 1, 90, 2, 1, 32, 16, [3], channels=True, small=True),
    _case("narrow", 2, 9, 4, 1, 16, 16, [], channels=True, stored=0, firsts=[0, 3], small=True),
    _case("bounded", 1, 40, 1, 1, 20, 24, [0], channels=True, lower_bound=-5.0, rounded=True, small=True),
    _case("packed", 1, 150, 1, 1, 16, 16, [0, 8, 3], spans=[(2, 70), (70, 70), (75, 148)], small=True),
    _case("apart", 1, 150, 1, 1, 16, 16, [0, 8, 3], spans=[(2, 70), (70, 71), (75, 148)], apart=True, small=True),
    _case("limited", 1, 150, 1, 1, 16, 16, [0, 8], spans=[(2, 70), (75, 148)], limited=[65, 20], small=True, **SPACE),
    _case("padded", 2, 40, 1, 1, 16, 16, [0, 0], spans=[(7, 40), (40, 70)], small=True),
    _case("space", 2, 70, 1, 2, 32, 24, [0, 5], small=True, **SPACE),
    _case("rows", 2, 70, 1, 2, 16, 16, [], stored=0, last=66, small=True),
    _case("rows-padded", 3, 80, 1, 1, 16, 16, [], stored=0, firsts=[79, 0, 70], last=77, small=True),
    _case("rows-go-on", 3, 70, 1, 1, 16, 16, [], stored=5, firsts=[5, 0, 20], small=True, **SPACE),
    _case("lightning", 2, 70, 3, 1, 32, 32, [], stored=0, **LIGHTNING, small=True),
    _case("minimax-01-2048", 1, 2048, 64, 1, 128, 128, [0], **LIGHTNING),
    _case("qwen3.5-9b-2048", 1, 2048, 16, 2, 128, 128, [0]),
    _case("qwen3.6-35b-8192", 1, 8192, 16, 2, 128, 128, [0]),
    _case("qwen3.6-27b-rows", 4, 500, 16, 3, 128, 128, [0, 9, 0, 64]),
    _case("olmo-hybrid-1024", 1, 1024, 30, 1, 96, 192, [0]),
    _case("kimi-linear-2048", 1, 2048, 32, 1, 128, 128, [0], channels=True),
    _case("nemotron-h-2048", 1, 2048, 8, 16, 128, 80, [0], **SPACE),
    _case("falcon-h1-2048", 1, 2048, 1, 24, 256, 128, [0], **SPACE),
    _case("mamba2-2048", 1, 2048, 1, 80, 128, 64, [0], **SPACE),
)  # fmt: skip

linear_attention_prompt = make_op("linear_attention_prompt", reference, supports, CASES, changes=True)
