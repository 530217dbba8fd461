"""Attention over latents: what is recognized, and what else fits in part and is refused."""

import copy

import pytest
import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig

import accel
from accel.llm.attention.latent_attention import LatentSpec
from accel.llm.kv_cache.cache import adopt, store_of
from accel.llm.recording.record import NotUnderstood
from accel.llm.runtime.analyze import formulas
from support.everything import EVERYTHING
from support.llm.families import BY_NAME, make, padded, prompt
from support.llm.optimized_models import shared
from support.llm.outputs import generate, same, write_alike
from support.llm.quantized import rounded

# Whether queries have a low rank, pairs are neighbors, and come apart.
WAYS = {
    "deepseek-v2": (False, True, False),
    "deepseek-v3": (True, True, True),
    "minicpm3": (True, False, False),
    "glm4-moe-lite": (True, True, True),
    "youtu": (True, False, False),
    "axk1": (True, True, True),
}


def attentions(model) -> list:
    return [spec.attention for _, spec in formulas(model, {})]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [name for name in WAYS if name in BY_NAME])
def test_each_is_recognized(name, dtype):
    for one in attentions(make(name, dtype=dtype)):
        assert type(one) is LatentSpec
        assert (one.q_up is not None, one.rotary.interleaved, one.to_halves) == WAYS[name]
        assert (one.rank, one.nope, one.rope, one.values, one.heads) == (16, 8, 8, 12, 4)
        assert one.scale == pytest.approx(16**-0.5)


def test_yarn_changes_the_scale():
    rope = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.8, "rope_theta": 1e4,
            "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}  # fmt: skip
    stock = make("deepseek-v3", rope_parameters=rope)
    assert {one.scale for one in attentions(stock)} == {stock.model.layers[0].self_attn.scaling} != {16**-0.5}
    ours = accel.optimize(copy.deepcopy(stock))
    write_alike(ours, stock)
    assert not accel.report(ours).fallbacks


def expanded(model, monkeypatch, change):
    """What expand_kv makes of latents, changed."""
    kind = type(model.model.layers[0].self_attn)
    before = kind.expand_kv
    monkeypatch.setattr(kind, "expand_kv", lambda self, *given: change(*before(self, *given)))


def normed(model, monkeypatch, make_norm):
    for layer in model.model.layers:
        layer.self_attn.kv_a_layernorm = make_norm(layer.self_attn.kv_lora_rank)


def biased(model, monkeypatch, _):
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.bias = nn.Parameter(torch.ones(layer.self_attn.kv_b_proj.out_features))


def windowed(model, monkeypatch, _):
    """Keys beyond a window are those of its edge: only beyond the run that is looked at."""
    expanded(model, monkeypatch, lambda k, v: (k, v.roll(1, 2)))


OTHER = "queries, scores or result are of another formula"
LARGE = "it computes something else where numbers are large"
EDITS = {
    "values bent where large": (expanded, lambda k, v: (k, v.clamp(-50, 50)), LARGE),
    "keys bent where large": (expanded, lambda k, v: (k.clamp(-50, 50), v), LARGE),
    "other values": (expanded, lambda k, v: (k, 1.01 * v), OTHER),
    "heads that share values": (expanded, lambda k, v: (k, v.flip(1)), OTHER),
    "a norm with a mean": (normed, nn.LayerNorm, "the norm of its latents"),
    "a norm without weight": (normed, lambda size: nn.RMSNorm(size, elementwise_affine=False), "the norm of its"),
    "no norm": (normed, lambda size: nn.Identity(), "the norm of its"),
    "a bias behind latents": (biased, None, OTHER),
    "values of other tokens": (windowed, None, OTHER),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.share(1)
def test_what_is_another_formula_in_part_is_refused(edit, monkeypatch):
    change, how, reason = EDITS[edit]
    model = make("deepseek-v3")
    change(model, monkeypatch, how)
    with pytest.raises(NotUnderstood, match=reason):
        formulas(model, {})
    if EVERYTHING:
        ours = accel.optimize(copy.deepcopy(model))
        write_alike(ours, model)


def louder(kind):
    return type("Louder", (kind,), {"forward": lambda self, x: 2 * kind.forward(self, x)})


@pytest.mark.parametrize("change", ["norm", "bias", "weight"])
def test_what_changes_after_runs_stock(change):
    stock = make("deepseek-v2")
    ours = accel.optimize(copy.deepcopy(stock))
    write_alike(ours, stock)
    for model in (ours, stock):
        attention = model.model.layers[1].self_attn
        if change == "norm":
            attention.kv_a_layernorm.__class__ = louder(type(attention.kv_a_layernorm))
        elif change == "bias":
            attention.kv_b_proj.bias = nn.Parameter(torch.ones(attention.kv_b_proj.out_features))
        else:
            attention.kv_b_proj.weight.data.mul_(1.5)  # which is read where it lies
    write_alike(ours, stock)
    assert bool(accel.report(ours).fallbacks) == (change != "weight")


def test_what_the_cache_shows_is_what_stocks_holds():
    """A latent and a rotated part of the key a token, which stock code goes on with."""
    stock = make("deepseek-v3")
    ours = accel.optimize(copy.deepcopy(stock))
    ids = prompt(2, 9)
    with torch.no_grad():
        mine, theirs = (model(ids, use_cache=True) for model in (ours, stock))
    caches = [output.past_key_values for output in (mine, theirs)]
    store = store_of(caches[0])
    assert store is not None and [shape.size for shape in store.shapes] == [(16 + 8) * 4] * 2
    for one, other in zip(*(cache.layers for cache in caches), strict=True):
        assert one.keys.shape == other.keys.shape == (2, 1, 9, 16) and one.values.shape == (2, 1, 9, 8)
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.values, other.values, rtol=1e-4, atol=1e-5)
    more = prompt(2, 3, seed=1)
    with torch.no_grad():
        handed, taken = stock(more, past_key_values=caches[0]), ours(more, past_key_values=caches[1])
    torch.testing.assert_close(handed.logits, taken.logits, rtol=1e-4, atol=1e-4)
    assert store_of(caches[1]) is not None and not accel.report(ours).fallbacks


@torch.no_grad()
@pytest.mark.parametrize("weights", ["int8", "int4-g32"])
def test_what_makes_keys_and_values_is_written_out_where_it_is_quantized(weights):
    stock = make("deepseek-v2", moe_intermediate_size=64, kv_lora_rank=32)
    ours = accel.optimize(copy.deepcopy(stock), weights=weights)
    rows = {path: status for path, rule, status, _ in accel.report(ours).sites if rule == "weights"}
    assert rows["model.layers.0.self_attn.kv_b_proj"] == "patched"
    ids, mask = padded()
    same(generate(ours, ids, mask), generate(rounded(stock, ours), ids, mask))
    layer = vars(ours.model.layers[0])["forward"]
    address = layer.bound.attention.written.numbers.data_ptr()
    assert layer.bound.attention.written.numbers.shape == (4 * 20, 32) and not accel.report(ours).fallbacks
    begun = [model(ids[:, :-1], use_cache=True).past_key_values for model in (ours, rounded(stock, ours))]
    ours.model.layers[0].self_attn.kv_b_proj.scales.mul_(1.5)  # in place, as a state_dict is loaded
    models = ours, rounded(stock, ours)
    mine, theirs = (one(ids[:, -1:], past_key_values=text) for one, text in zip(models, begun, strict=True))
    torch.testing.assert_close(mine.logits, theirs.logits, rtol=1e-4, atol=1e-4)
    vars(ours)["forward"].seen = None  # as where the model has changed: graphs of before read where they read
    same(generate(ours, ids, mask), generate(models[1], ids, mask))
    assert layer.bound.attention.written.numbers.data_ptr() == address and not accel.report(ours).fallbacks


def test_every_head_has_a_counter():
    """By which programs of one kernel find who of them is last."""
    ours = shared("deepseek-v2").ours
    store = adopt(DynamicCache(), vars(ours)["forward"].shapes())
    store.reserve(2, 5)
    assert store.kvs([0, 1], 6)[1].split_counters.numel() == 6 * 4


def test_requests_are_batched():
    """Which transformers' own cache of pages has no room for."""
    stock = make("deepseek-v2")
    ours = accel.optimize(copy.deepcopy(stock))
    prompts = [prompt(1, length, seed=length)[0].tolist() for length in (5, 70, 9)]
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = {tuple(one.prompt_ids): one for one in ours.generate_batch(prompts, generation_config=config).values()}
    for ids in prompts:
        wanted = stock.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0, len(ids) :].tolist()
        assert found[tuple(ids)].generated_tokens == wanted and found[tuple(ids)].error is None
