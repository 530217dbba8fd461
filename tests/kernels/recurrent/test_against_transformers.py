"""Layers of linear attention of transformers, and the same from our operations: a prompt, then tokens one by one."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accel_kernels import Convolution, Decay, GatedNorm, Sequences, causal_convolution, rms_norm, selective_scan
from accel_kernels import linear_attention_prompt as prompt
from accel_kernels import linear_attention_step as step
from accel_kernels.norm.rms_norm import Gate
from transformers import AutoConfig, DynamicCache
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

if not hasattr(DynamicCache, "get_recurrent_state"):
    pytest.skip("before transformers 5.24 a cache shows no states", allow_module_level=True)

HIDDEN, TAPS = 24, 4
DELTA = {
    "hidden_size": HIDDEN, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 12, "linear_conv_kernel_dim": TAPS, "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
KIMI = {
    "hidden_size": HIDDEN, "linear_num_heads": 2, "linear_head_dim": 16, "linear_conv_kernel_dim": TAPS,
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MAMBA = {
    "hidden_size": HIDDEN, "num_heads": 6, "head_dim": 8, "expand": 2, "state_size": 16, "n_groups": 2,
    "conv_kernel": TAPS, "chunk_size": 32, "num_hidden_layers": 1,
}  # fmt: skip
LFM2 = {"hidden_size": HIDDEN, "conv_L_cache": 3, "num_hidden_layers": 1, "layer_types": ["conv"]}


def separate(module, h):
    """q, k, v, a, b and gate of one product each, or of one for q, k and v."""
    heads = getattr(module, "num_k_heads", None) or module.num_heads
    values = getattr(module, "num_v_heads", heads)
    if hasattr(module, "in_proj_qkv"):
        q, k, v = module.in_proj_qkv(h).split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
        a, b, gate = module.in_proj_a(h), module.in_proj_b(h), module.in_proj_z(h)
    elif hasattr(module, "forget_gate"):
        q, k, v, b = module.q_proj(h), module.k_proj(h), module.v_proj(h), module.b_proj(h)
        a = module.forget_gate.f_b_proj(module.forget_gate.f_a_proj(h))
        gate = module.g_b_proj(module.g_a_proj(h))
    else:
        q, k, v = module.q_proj(h), module.k_proj(h), module.v_proj(h)
        a, b, gate = module.a_proj(h), module.b_proj(h), module.g_proj(h)
    shape = (heads, values // heads)
    a = a.unflatten(-1, (*shape, -1)) if hasattr(module, "forget_gate") else a.unflatten(-1, shape)
    return SimpleNamespace(
        q=q.unflatten(-1, (heads, -1)), k=k.unflatten(-1, (heads, -1)), v=v.unflatten(-1, (*shape, -1)), a=a,
        b=b.unflatten(-1, shape), gate=gate.unflatten(-1, (*shape, -1)),
    )  # fmt: skip


def by_key_head(module, h):
    """Qwen3-Next has all of a key head side by side."""
    heads, repeat = module.num_k_heads, module.num_v_heads // module.num_k_heads
    keys, values = module.head_k_dim, module.head_v_dim * repeat
    given = module.in_proj_qkvz(h).unflatten(-1, (heads, -1)).split([keys, keys, values, values], dim=-1)
    q, k, v, gate = given
    b, a = module.in_proj_ba(h).unflatten(-1, (heads, -1)).split([repeat, repeat], dim=-1)
    v, gate = (t.unflatten(-1, (repeat, -1)) for t in (v, gate))
    return SimpleNamespace(q=q, k=k, v=v, a=a, b=b, gate=gate)


def space(module, h):
    groups, size = module.n_groups, module.ssm_state_size
    inner = module.intermediate_size
    parts = module.in_proj(h).split([inner, inner, groups * size, groups * size, module.num_heads], dim=-1)
    gate, v, k, q, a = parts
    repeat = module.num_heads // groups
    return SimpleNamespace(
        q=q.unflatten(-1, (groups, size)), k=k.unflatten(-1, (groups, size)),
        v=v.unflatten(-1, (groups, repeat, -1)), a=a.unflatten(-1, (groups, repeat)), b=None,
        gate=gate.unflatten(-1, (groups, repeat, -1)),
    )  # fmt: skip


def ours(module, parts_of, hidden, prompt_tokens, spans, activation="silu", beta_scale=1.0):
    """The outputs of all tokens, and the state and window behind the last."""
    gates = getattr(module, "forget_gate", module)
    delta = not hasattr(module, "D")
    norm = getattr(module, "o_norm", None) or module.norm
    rows = hidden.shape[0]
    first = parts_of(module, hidden[:, :prompt_tokens])
    heads = first.v.shape[2] * first.v.shape[3]
    bias = gates.dt_bias.float()
    decay = Decay(
        gates.A_log.float().flatten(), bias.view(heads, -1) if bias.numel() > heads else bias, rounded=not delta
    )
    more = {
        "scale": first.q.shape[-1] ** -0.5 if delta else 1.0, "key_eps": 1e-6 if delta else None,
        "skip": None if delta else module.D, "beta_scale": beta_scale,
    }  # fmt: skip
    order = "qkv" if delta else "vkq"
    weight, taps = module.conv1d.weight.squeeze(1), module.conv1d.weight.shape[-1]
    slots = torch.arange(rows).flip(0)
    state = torch.full((rows, heads, first.k.shape[-1], first.v.shape[-1]), float("nan"))
    window = torch.full((rows, taps, weight.shape[0]), float("nan"))
    at = Sequences(slots, torch.zeros(rows, dtype=torch.int64), spans)
    x = torch.cat([getattr(first, name).flatten(2) for name in order], -1)
    y = causal_convolution(x, weight, window, at, bias=module.conv1d.bias, activation=module.activation)
    sizes = [getattr(first, name)[0, 0].numel() for name in order]
    found = dict(zip(order, y.split(sizes, -1), strict=True))
    q, k, v = (found[name].view(getattr(first, name).shape) for name in "qkv")
    o = prompt(q, k, v, first.a, decay, state, at, b=first.b, **more).flatten(2)
    groups = heads if delta else module.n_groups
    weights = norm.weight.repeat(heads) if delta else norm.weight
    gate = Gate(first.gate.flatten(2), activation, not delta)
    outputs = [rms_norm(o, weights, norm.variance_epsilon, groups=groups, gate=gate)]
    positions = torch.full((rows,), prompt_tokens) if spans is None else spans[:, 1] - spans[:, 0]
    for token in range(prompt_tokens, hidden.shape[1]):
        parts = parts_of(module, hidden[:, token])
        gated = {"norm": GatedNorm(parts.gate, norm.weight, norm.variance_epsilon, activation, activation == "silu")}
        o = step(
            parts.q, parts.k, parts.v, parts.a, decay, state, Sequences(slots, positions), b=parts.b, **more,
            convolution=Convolution(weight, window, module.conv1d.bias, module.activation, order),
            **(gated if delta else {}),
        )  # fmt: skip
        if not delta:
            o = rms_norm(
                o, norm.weight, norm.variance_epsilon, groups=groups, gate=Gate(parts.gate.flatten(1), "silu", True)
            )
        outputs.append(o.unsqueeze(1))
        positions = positions + 1
    out = getattr(module, "o_proj", None) or module.out_proj
    return out(torch.cat(outputs, 1)), state[slots], window, positions


FAMILIES = {
    "qwen3_next": (Qwen3NextGatedDeltaNet, DELTA, by_key_head, {}),
    "qwen3_5": ("qwen3_5_text", Qwen3_5GatedDeltaNet, DELTA, separate, {}),
    "olmo_hybrid": (OlmoHybridGatedDeltaNet, DELTA, separate, {"beta_scale": 2.0}),
    "kimi_linear": (KimiLinearDeltaAttention, KIMI, separate, {"activation": "sigmoid"}),
    "mamba2": (Mamba2Mixer, MAMBA, space, {}),
}


def layer(name):
    *named, kind, config, parts_of, more = FAMILIES[name]
    config = AutoConfig.for_model(*(named or [name]), **config)
    torch.manual_seed(1)
    module = kind(config, 0).eval()
    for parameter_name, parameter in module.named_parameters():
        last = parameter_name.rsplit(".", 1)[-1]
        if last in ("A_log", "dt_bias"):
            parameter.data.normal_(-0.5, 0.7)
    return config, module, parts_of, more


@pytest.mark.share(1)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_layer_is_transformers(name, padded):
    """Tokens of padding are in no span; transformers multiplies them by 0."""
    config, module, parts_of, more = layer(name)
    tokens = 70
    hidden = torch.randn(2, tokens + 3, HIDDEN)
    mask, spans = None, None
    if padded:
        mask = torch.ones(2, tokens, dtype=torch.bool)
        mask[1, :9] = False
        spans = torch.tensor([[0, tokens], [tokens + 9, 2 * tokens]])
    cache = DynamicCache(config=config)
    wanted = [module(hidden[:, :tokens], cache, attention_mask=mask)]
    wanted += [module(hidden[:, t : t + 1], cache) for t in range(tokens, tokens + 3)]
    found, state, window, positions = ours(module, parts_of, hidden, tokens, spans, **more)
    real = torch.ones(2, tokens + 3, dtype=torch.bool) if mask is None else F.pad(mask, (0, 3), value=True)
    torch.testing.assert_close(found[real], torch.cat(wanted, 1)[real], rtol=2e-4, atol=2e-5)
    kept = cache.get_recurrent_state(0, state_idx=0)
    kept = kept.transpose(2, 3) if name == "mamba2" else kept
    torch.testing.assert_close(state, kept, rtol=2e-4, atol=2e-5)
    taps = window.shape[1]
    places = (positions[:, None] - taps + torch.arange(taps)) % taps
    window = torch.stack([window[1 - row][places[row]] for row in range(2)])
    torch.testing.assert_close(window.transpose(1, 2), cache.get_conv_state(0, state_idx=0), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_a_short_convolution_is_lfm2():
    config = AutoConfig.for_model("lfm2", **LFM2)
    module = Lfm2ShortConv(config, 0).eval()
    hidden = torch.randn(2, 12, HIDDEN)
    cache = DynamicCache(config=config)
    wanted = [module(hidden[:, :9], cache)] + [module(hidden[:, t : t + 1], cache) for t in range(9, 12)]
    window, positions, found = torch.full((2, 3, HIDDEN), float("nan")), torch.zeros(2, dtype=torch.int64), []
    for part in (hidden[:, :9], *(hidden[:, t : t + 1] for t in range(9, 12))):
        before, after, x = module.in_proj(part).chunk(3, dim=-1)
        at = Sequences(torch.arange(2), positions)
        weight = module.conv.weight.squeeze(1)
        y = causal_convolution(x, weight, window, at, bias=module.conv.bias, before=before, after=after)
        found.append(module.out_proj(y))
        positions = positions + part.shape[1]
    torch.testing.assert_close(torch.cat(found, 1), torch.cat(wanted, 1), rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_a_scan_is_mamba():
    config = AutoConfig.for_model("mamba", hidden_size=HIDDEN, state_size=5, conv_kernel=TAPS, num_hidden_layers=1)
    torch.manual_seed(2)
    module = MambaMixer(config, 0).eval()
    hidden = torch.randn(2, 12, HIDDEN)
    parts = (hidden[:, :9], *(hidden[:, t : t + 1] for t in range(9, 12)))
    cache = DynamicCache(config=config)
    wanted = [module(part, cache) for part in parts]
    inner, size = module.intermediate_size, module.ssm_state_size
    window, positions, found = torch.full((2, TAPS, inner), float("nan")), torch.zeros(2, dtype=torch.int64), []
    state = torch.full((2, inner, size), float("nan"))
    for part in parts:
        at = Sequences(torch.arange(2), positions)
        x, gate = module.in_proj(part).chunk(2, dim=-1)
        weight = module.conv1d.weight.squeeze(1)
        x = causal_convolution(x, weight, window, at, bias=module.conv1d.bias, activation="silu")
        dt, k, q = module.x_proj(x).split([module.time_step_rank, size, size], dim=-1)
        more = {"bias": module.dt_proj.bias, "skip": module.D, "gate": gate}
        y = selective_scan(x, dt @ module.dt_proj.weight.t(), module.A_log, k, q, state, at, **more)
        found.append(module.out_proj(y))
        positions = positions + part.shape[1]
    torch.testing.assert_close(torch.cat(found, 1), torch.cat(wanted, 1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(state, cache.get_recurrent_state(0, state_idx=0), rtol=1e-4, atol=1e-6)
