"""Attention over stored latents, in Triton's interpreter: what is stored, and layers of transformers."""

import importlib
import inspect
from functools import partial

import pytest
import torch
from accel_kernels import KV, Norm, latent_attention
from accel_kernels.attention.paged.kv import LENGTH, PADDING_MASK, metadata_of
from accel_kernels.attention.paged.kv_quantization import restored
from transformers import AutoConfig, DynamicCache

from support.everything import EVERYTHING

pytest.importorskip("triton")
kernels = importlib.import_module("accel_kernels.attention.latent.latent_attention_triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels"),
    pytest.mark.usefixtures("poisoned"),
]

SMALL = [case for case in latent_attention.cases if case.small]
FRESH = [case for case in SMALL if case.name.startswith("prefill") and "more" not in case.name]


def made(case):
    """The arguments of a call, with NaN where nothing is stored yet."""
    (q, compressed, kv, *rest), kwargs = case.make(torch.device("cpu"), torch.float32)
    behind = torch.ones(kv.keys.shape[:2], dtype=torch.bool)
    for alone in [kv] if kv.ragged is None else [alone for _, alone in kv.sequences()]:
        behind[alone.slots(0, alone.stored())] = False
    for tensor in (kv.keys, kv.values) if kv.key_scales is None else (kv.key_scales, kv.values):
        tensor[behind] = float("nan")
    return (q, compressed, kv, *rest), kwargs


def same_store(found, wanted):
    """Codes by what they stand for."""
    kept = [one.values if one.key_scales is None else restored(one.keys, one.key_scales, torch.float32)
            for one in (found, wanted)]  # fmt: skip
    torch.testing.assert_close(*kept, rtol=1e-5, atol=1e-6, equal_nan=True)
    kept = [one.keys if one.key_scales is None else one.values for one in (found, wanted)]
    torch.testing.assert_close(*kept, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.share(3)
@pytest.mark.turns(2)
def test_new_latents_are_stored_where_the_table_says_and_nowhere_else(case):
    (theirs, kwargs), (ours, _) = made(case), made(case)
    wanted, found = latent_attention.reference(*theirs, **kwargs), latent_attention.triton(*ours, **kwargs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    same_store(ours[2], theirs[2])


@pytest.mark.parametrize("case", FRESH if EVERYTHING else FRESH[:2], ids=lambda case: case.name)
def test_a_graph_finds_latents_by_their_addresses(case):
    """What it is shown besides is another store's."""
    (theirs, kwargs), ((q, compressed, kv, *rest), _) = made(case), made(case)
    parts = {name: getattr(kv, name) for name in ("keys", "values", "key_scales")}
    other = {name: t if t is None else torch.full_like(t, 99) for name, t in parts.items()}
    shown = kv._replace(by_address=True, **other)
    found = latent_attention.triton(q, compressed, shown, *rest, **kwargs)
    torch.testing.assert_close(found, latent_attention.reference(*theirs, **kwargs), rtol=1e-4, atol=1e-5)
    same_store(kv, theirs[2])
    assert all(t is None or bool((t == 99).all()) for t in other.values())


@pytest.mark.parametrize("tile", [(64, 16, 32, 8, 2), (32, 8, 32, 8, 3)], ids=str)
@pytest.mark.parametrize("name", ["verify-valid", "prefill-more-filled", "ragged-mixed-idle"])
def test_tiles_of_other_gpus(name, tile, monkeypatch):
    monkeypatch.setattr(kernels, "latent_tile", lambda *_: kernels.Tile(*tile))
    case = next(case for case in SMALL if case.name == name)
    (theirs, kwargs), (ours, _) = made(case), made(case)
    wanted, found = latent_attention.reference(*theirs, **kwargs), latent_attention.triton(*ours, **kwargs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 7, 40])
@pytest.mark.parametrize("name", ["decode-valid", "verify", "prefill-more", "ragged-mixed"])
def test_shares_of_any_number(name, splits, monkeypatch):
    """Of few queries and of many, whose latents are multiplied by the library."""
    monkeypatch.setattr(kernels, "split_count", lambda *_, **__: splits)
    case = next(case for case in SMALL if case.name == name)
    (theirs, kwargs), ((q, compressed, kv, *rest), _) = made(case), made(case)
    counters = torch.zeros(q.shape[:3].numel(), dtype=torch.int32)
    found = latent_attention.triton(q, compressed, kv._replace(split_counters=counters), *rest, **kwargs)
    torch.testing.assert_close(found, latent_attention.reference(*theirs, **kwargs), rtol=1e-4, atol=1e-5)
    assert not counters.any()  # left as they were


def refused(change, value):
    (q, compressed, kv, up, scale), kwargs = SMALL[0].make(torch.device("cpu"), torch.float32)
    given = {"q": q, "compressed": compressed, "kv": kv, "up": up, "scale": scale, **kwargs}
    reason = latent_attention.supports(**given | {change: value(given[change])})
    assert isinstance(reason, str)
    return reason


def test_unsupported_calls_are_named():
    assert "empty" in refused("q", lambda q: q[:, :0])
    assert "shared ones" in refused("compressed", lambda t: torch.cat([t] * 3, -1))
    assert "rotated" in refused("cos", lambda t: t[..., 1:])
    assert "next to each other" in refused("up", lambda t: t.mT.contiguous().mT)
    assert "dtypes" in refused("up", lambda t: t.half())
    assert "mean" in refused("norm", lambda norm: norm._replace(centered=True))


SIZES = {
    "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3, "kv_lora_rank": 24, "q_lora_rank": 20,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "num_hidden_layers": 1,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.8, "rope_theta": 1e4,
        "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}  # fmt: skip
FAMILIES = {
    "deepseek_v2": ("DeepseekV2Attention", {"head_dim": 8, "q_lora_rank": None}, {"interleaved": True}),
    "deepseek_v3": (
        "DeepseekV3Attention",
        {"rope_parameters": YARN, "max_position_embeddings": 64},
        {"interleaved": True, "to_halves": True},
    ),
    "glm4_moe_lite": ("Glm4MoeLiteAttention", {}, {"interleaved": True, "to_halves": True}),
    "minicpm3": ("MiniCPM3Attention", {"head_dim": 8}, {}),
    "kimi_linear": ("KimiLinearAttention", {"layer_types": ["full_attention"]}, {}),
    "youtu": ("YoutuAttention", {"rope_interleave": False}, {}),
    "longcat_flash": ("LongcatFlashMLA", {"num_layers": 1, "head_dim": 8}, {"interleaved": True, "to_halves": True}),
}


def layer(family):
    """The attention of a tiny model, its configuration, and its cosines and sines as ours takes them."""
    name, more, _ = FAMILIES[family]
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = AutoConfig.for_model(family, **SIZES | more)
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    module = getattr(modeling, name)(config, 0).eval()
    module.kv_a_layernorm.weight.data.normal_(1.0, 0.3)
    rotary = next((kind for one, kind in vars(modeling).items() if one.endswith("RotaryEmbedding")), None)
    return module, config, None if rotary is None else rotary(config)


def ours(module, h, kv, angles, run, more):
    """The layer from the operation. LongCat's factors go into the norm and the scale."""
    heads = module.num_heads
    if module.q_lora_rank is None:
        q = module.q_proj(h)
    else:
        q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(h)))
    norm = module.kv_a_layernorm
    norm = Norm(norm.weight * getattr(module, "mla_scale_kv_lora", 1.0), None, norm.variance_epsilon)
    up, scale = module.kv_b_proj.weight.unflatten(0, (heads, -1)), getattr(module, "mla_scale_q_lora", 1.0)
    given = q.unflatten(-1, (heads, -1)), module.kv_a_proj_with_mqa(h), kv, up, module.scaling * scale
    assert latent_attention.supports(*given, norm=norm, **angles, **more) is None
    return module.o_proj(run(*given, norm=norm, **angles, **more))


@pytest.mark.share(6)
@pytest.mark.parametrize("run", ["triton", "reference"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
@pytest.mark.turns(2)
def test_a_layer_is_transformers(family, padded, run):
    """A prompt, one token, four at once, and a prompt behind them; the second row with five tokens of left padding."""
    module, config, rotary = layer(family)
    parts = (21, 1, 4, 19)
    hidden = torch.randn(2, sum(parts), 36)
    there = torch.ones(2, 48, dtype=torch.bool)
    if padded:
        there[1, :5] = False
    latents = torch.full((8, 16, 1, 32), float("nan"))
    table = torch.randperm(8).view(2, 4)[:, :3].int().contiguous()
    kv = KV(latents, latents[..., :24], table, there if padded else None, metadata_of(3, [(table, latents)], "cpu"), 0)
    kv.metadata[PADDING_MASK] = there.data_ptr() if padded else 0
    cache = DynamicCache(config=config)
    cache_name = "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"
    call, start = getattr(latent_attention, run), 0
    for new in parts:
        end = start + new
        h = hidden[:, start:end]
        kv.metadata[LENGTH] = start
        positions = (there.cumsum(-1) - 1).clamp_min(0)[:, start:end]
        embeddings, angles = None, {}
        if rotary is not None:
            embeddings = rotary(h, positions)
            complex_ones = torch.is_tensor(embeddings)
            pair = (embeddings.real, embeddings.imag) if complex_ones else (t[..., :4] for t in embeddings)
            angles = dict(zip(("cos", "sin"), pair, strict=True))
        seen = (torch.arange(end) <= torch.arange(start, end)[:, None]) & there[:, None, None, :end]
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        theirs = partial(module, position_embeddings=embeddings, **{cache_name: cache})
        wanted = theirs(h, attention_mask=mask)[0]
        found = ours(module, h, kv._replace(is_prefill=start == 0), angles, call, FAMILIES[family][2])
        real = there[:, start:end]
        torch.testing.assert_close(found[real], wanted[real], rtol=1e-4, atol=1e-5)
        start = end
    stored, _ = kv.read(start, torch.float32)
    kept = torch.cat((cache.layers[0].keys, cache.layers[0].values), dim=-1).transpose(1, 2)
    torch.testing.assert_close(stored, kept, rtol=1e-4, atol=1e-5)
