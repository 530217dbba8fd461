"""Rounded keys and values: what is stored, and what generate() makes of it."""

import copy
import functools
import math
import pickle

import pytest
import torch
from accel_kernels.device import Card, replayed
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import accel
from accel.llm.kv_cache.cache import StoreLayer, store_of
from accel.llm.kv_cache.layer_sets import LayerSet
from accel.llm.kv_cache.paged_kv_cache import PagedKVCache
from accel.llm.kv_cache.shape import LatentShape
from accel.llm.runtime.kv_quantization import KV_DTYPES, LEAST, key_decibels, kv_dtype_for
from support.llm.batching.engines import as_alone, engine_of, finished, requests
from support.llm.families import every, make, padded, prompt
from support.llm.modes import MODES
from support.llm.outputs import generate, same
from support.llm.rounded_cache import held, pair, rounding

KINDS = list(KV_DTYPES)
# Modes in which no cache is dropped, copied from one kind to another, or used by stock beside ours.
APART = {"no-cache", "no-cache-beam", "static", "static-object", "early-exit", "hidden-states", "attentions"}
ALL_MODES = [mode for mode in MODES if mode.name not in APART]
BESIDES = ("chunked-prefill-padded", "continued-padded", "cropped", "fanned-out", "prompt-lookup", "sample")
SOME_MODES = [mode for mode in ALL_MODES if mode.share <= 4 or mode.name in BESIDES]
OTHERS = ("llama-mqa", "llama-head-dim-10", "gpt2", "bloom", "gpt-neox", "mistral", "qwen3", "gpt-oss", "gemma2",
          "minicpm3")  # fmt: skip
PRODUCT = [
    (name, kind, mode)
    for name, kind, modes in (
        ("llama", "int8", ALL_MODES),
        ("llama", "fp8", SOME_MODES),
    )
    for mode in modes
] + every(3, OTHERS, ["int8"], SOME_MODES)
pair_of = functools.cache(pair)


@pytest.mark.share(24)
@pytest.mark.parametrize(("name", "kind", "mode"), PRODUCT, ids=str)
@pytest.mark.turns(2)
def test_text_is_that_of_stock_over_a_rounded_cache(name, kind, mode):
    ours, stock = pair_of(name, kind)
    inputs = padded(mode.lengths)
    with rounding(KV_DTYPES[kind]):
        theirs = mode(stock, *inputs)
    mine = mode(ours, *inputs)
    # Nearly all agree as exact ones do, to 1e-5. Where a number lies in the middle of two codes, sums in another order
    # send it the other way: of one element 1/127 of its head's largest.
    same(mine, theirs, share=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_stock_without_rounding_is_further_away(kind):
    ours, stock = pair("llama", kind)
    inputs = padded()
    call = {"output_logits": True, "return_dict_in_generate": True}
    mine = generate(ours, *inputs, **call)["logits.0"]
    with rounding(KV_DTYPES[kind]):
        near = generate(stock, *inputs, **call)["logits.0"]
    far = generate(stock, *inputs, **call)["logits.0"]
    assert (mine - far).norm() > 100 * (mine - near).norm()


@pytest.mark.parametrize(("name", "kind"), [("llama", "int8"), ("llama", "fp8"), ("minicpm3", "int8")])
def test_logits_do_not_depend_on_how_a_text_is_cut(name, kind):
    """A prompt at once, in pieces, token by token, and with a piece taken back."""
    ours, _ = pair(name, kind)
    ids, found = prompt(2, 12), []
    for cuts in ([12], [5, 7], [1] * 12, [7, 4, -2, 3]):
        cache, logits, at = DynamicCache(), [], 0
        for cut in cuts:
            if cut < 0:
                cache.crop(cut)
                logits = [torch.cat(logits, 1)[:, :cut]]
            else:
                logits.append(ours(ids[:, at : at + cut], past_key_values=cache).logits)
            at += cut
        found.append(torch.cat(logits, 1))
    for other in found[1:]:
        assert float((other - found[0]).abs().max() / found[0].abs().max()) < 2e-5
    assert not accel.report(ours).fallbacks


# -- which layers may be rounded ---------------------------------------------------------------------------------------


def plant(model, layer: int, size: float) -> None:
    """A bias of keys as Qwen2.5 has it: a few channels of every head, the slowly turning ones, are constants."""
    bias = model.model.layers[layer].self_attn.k_proj.bias
    dim = model.config.hidden_size // model.config.num_attention_heads
    for head in bias.data.view(-1, dim):
        head[dim // 2 - 1], head[dim - 1] = size, -size


def planted(size: float = 300.0):
    model = make("qwen2", num_hidden_layers=3)
    plant(model, 1, size)
    return model


def off(model, inputs, wanted) -> float:
    return float((model(*inputs).logits - wanted).norm() / wanted.norm())


def test_a_layer_with_constants_in_its_keys_stays_as_it_is_and_is_named():
    stock = planted()
    ids = prompt(2, 24)
    wanted = stock(ids).logits
    with rounding(torch.int8):
        naive = off(stock, (ids,), wanted)
    ours = accel.optimize(copy.deepcopy(stock), kv_cache="int8")
    cache = DynamicCache()
    mine = off(lambda ids: ours(ids, past_key_values=cache), (ids,), wanted)
    assert [shape.kv_dtype for shape in store_of(cache).shapes] == [torch.int8, None, torch.int8]
    told = next(site[3] for site in accel.report(ours).sites if site[1] == "language model")
    assert "in float32 where rounded keys leave scores less than 18 dB: model.layers.1: " in told
    assert naive > 0.2 and mine < naive / 5, (naive, mine)
    with rounding(torch.float8_e4m3fn):
        assert off(stock, (ids,), wanted) < naive  # floats have digits for the small channels too
    assert torch.equal(accel.restore(ours)(ids).logits, wanted)
    with pytest.raises(ValueError, match=r"strict=True: kv_cache='int8': .*model\.layers\.1: \d+ dB"):
        accel.optimize(ours, kv_cache="int8", strict=True)
    assert not accel.report(ours).sites


@pytest.mark.parametrize(
    "mode", [mode for mode in MODES if mode.name in ("greedy-padded", "beam", "assisted-by-itself")], ids=str
)
def test_text_where_one_layer_stays_as_it_is(mode):
    """Layers of two kinds in one store."""
    stock = planted()
    ours = accel.optimize(copy.deepcopy(stock), kv_cache="int8")
    inputs = padded(mode.lengths)
    with rounding(torch.int8, except_layer=1):
        theirs = mode(stock, *inputs)
    same(mode(ours, *inputs), theirs, share=2e-3)


def test_decibels_see_what_the_size_of_keys_hides():
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 7, 64, generator=g) for heads in (4, 2))
    assert 38 < key_decibels(q, k, 1.0, torch.int8) < 46 and 28 < key_decibels(q, k, 1.0, torch.float8_e4m3fn) < 36
    k[:, 1, :, 5] += 200.0  # of one head
    assert key_decibels(q, k, 1.0, torch.int8) < 12 and key_decibels(q, k, 1.0, torch.float8_e4m3fn) > LEAST
    assert key_decibels(q, k, 1e-6, torch.int8) == math.inf  # no score notices
    k[0, 0, 0, 0] = math.nan
    assert not key_decibels(q, k, 1.0, torch.int8) >= LEAST


# -- latents -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind", "most"), [("minicpm3", "int8", 0.02), ("deepseek-v3", "int8", 0.03),
                                                    ("minicpm3", "fp8", 0.1)])  # fmt: skip
def test_latents_in_8_bits(name, kind, most):
    """As far from stock as stock over a rounded cache is; a batch of requests writes what generate() does."""
    ours, stock = pair(name, kind)
    ids, cache = prompt(2, 24), DynamicCache()
    wanted, mine = stock(ids).logits, ours(ids, past_key_values=cache).logits
    with rounding(KV_DTYPES[kind]):
        theirs = off(stock, (ids,), wanted)
    found = float((mine - wanted).norm() / wanted.norm())
    assert 0 < found <= min(1.1 * theirs, most), (found, theirs)
    assert {shape.kv_dtype for shape in store_of(cache).shapes} == {KV_DTYPES[kind]}
    asked, engine = requests((5, 70, 33), 6), engine_of(ours, tokens=32)
    finished(engine, asked)
    as_alone(ours, asked)
    assert not accel.report(ours).fallbacks


def test_latents_take_half_of_their_memory():
    """In the sizes of DeepSeek-V2; the part of keys that heads share stays as it is. The report says what is taken."""
    exact = LatentShape(512, 64, 128, torch.bfloat16, torch.device("cpu"))
    some, sets = (exact, exact), (LayerSet((0, 1), None),)
    sizes = [
        sum(tensor.nbytes for tensor in PagedKVCache(shapes, sets, 10, 2, 5).kept)
        for shapes in (some, [shape._replace(kv_dtype=torch.int8) for shape in some])
    ]
    beside = 2 * 10 * 64 * 64 * 2
    assert sizes[0] == 2 * 10 * 64 * 1152 and sizes[1] - beside <= 0.505 * (sizes[0] - beside)
    ours, *_, cache = held(name="minicpm3")
    store = store_of(cache)
    kept, size = sum(t.nbytes for t in store.blocks.kept), sum(shape.size for shape in store.shapes)
    assert kept == size * store.rows * store.capacity and size == 2 * (16 + 4 + 8 * 4)
    told = next(site[3] for site in accel.report(ours).sites if site[1] == "language model")
    assert f"in int8: {size} bytes a token instead of {2 * 24 * 4}" in told


@pytest.mark.parametrize("channel", [0, None])
def test_latents_of_which_one_channel_is_large_stay_as_they_are(channel):
    """The same function: what reads them takes the channel for as much smaller."""
    stock = make("minicpm3")
    with torch.no_grad():
        attention = stock.model.layers[1].self_attn
        if channel is not None:
            attention.kv_a_layernorm.weight[channel] *= 3000
            attention.kv_b_proj.weight[:, channel] /= 3000
    ours, cache = accel.optimize(copy.deepcopy(stock), kv_cache="int8"), DynamicCache()
    ours(prompt(2, 9), past_key_values=cache)
    assert [shape.kv_dtype for shape in store_of(cache).shapes] == [torch.int8, torch.int8 if channel is None else None]


# -- the option --------------------------------------------------------------------------------------------------------


def test_what_is_no_value_and_what_has_no_cache(tiny):
    model = make("llama")
    for value in ("int4", True, 8):
        with pytest.raises(ValueError, match="kv_cache=.* is not one of None, 'int8', 'fp8'"):
            accel.optimize(model, kv_cache=value)
    assert accel.Options(kv_cache="int8").lossy == "kv_cache='int8'"
    with pytest.raises(ValueError, match="for causal language models and encoder-decoders; a UNet2D"):
        accel.optimize(unet := tiny.unet(), kv_cache="int8")
    assert not accel.report(unet).sites


def test_a_gpu_without_8_bit_floats_is_told_what_it_lacks():
    with replayed(Card("", (8, 0), 108, 163 * 1024)), pytest.raises(ValueError, match="8.9; give 'int8' or None"):
        kv_dtype_for("fp8", torch.device("cuda"))
    assert kv_dtype_for("int8", torch.device("cuda")) == torch.int8


def test_a_model_that_stays_stock_says_that_nothing_is_rounded():
    model = accel.optimize(make("rwkv"), kv_cache="int8")
    assert any("kv_cache changes nothing" in site[3] for site in accel.report(model).sites)


def test_verify_calls_it_lossy():
    ours, *_ = held()
    quality = accel.verify(ours)
    assert quality.lossy == "kv_cache='int8'" and "lossy, as asked for (kv_cache='int8')" in quality.verdict


def next_logits(model, ids, cache):
    return model(ids[:, :1], past_key_values=cache).logits


def test_it_takes_the_memory_that_the_report_says():
    ours, *_, cache = held()
    store = store_of(cache)
    assert [shape.kv_dtype for shape in store.shapes] == [torch.int8] * 2
    kept = sum(t.nbytes for several in store.blocks.by_shape.values() for t in several)
    size = sum(shape.size for shape in store.shapes)
    assert kept == size * store.rows * store.capacity
    told = [site[3] for site in accel.report(ours).sites if site[1] == "language model"]
    assert f"keys and values in int8: {size} bytes a token instead of {2 * 2 * 2 * 16 * 4}" in told[0]


def test_who_looks_at_keys_gets_copies_in_a_stock_layer_and_edits_of_them_count():
    ours, stock, ids, cache = held()
    with rounding(torch.int8):
        theirs = DynamicCache()
        stock(ids, past_key_values=theirs)
        for one in (cache, theirs):
            one.layers[1].values[:, :, 2] *= -1.0
            one.layers[0].keys = one.layers[0].keys.clone()
        assert [type(layer) for layer in cache.layers] == [DynamicLayer] * 2
        torch.testing.assert_close(cache.layers[1].values, theirs.layers[1].values, rtol=1e-4, atol=1e-5)
        before = [t.clone() for layer in theirs.layers for t in (layer.keys, layer.values)]
        wanted = next_logits(stock, ids, theirs)
    torch.testing.assert_close(next_logits(ours, ids, cache), wanted, rtol=1e-4, atol=1e-4)
    assert store_of(cache)  # taken in again, rounded to what it was rounded to
    after = [t[:, :, :-1] for layer in cache.layers for t in (layer.keys, layer.values)]
    for mine, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_one_layer_read_or_reordered_by_itself_goes_on_from_what_it_held():
    ours, _, ids, cache = held(rows=3)
    wanted = next_logits(ours, ids, copy.deepcopy(cache))
    assert cache.layers[0].keys.shape == (3, 2, 9, 16) and cache.layers[0].keys.dtype == torch.float32
    assert [type(layer) for layer in cache.layers] == [DynamicLayer, StoreLayer]
    torch.testing.assert_close(next_logits(ours, ids, cache), wanted, rtol=1e-5, atol=1e-5)
    cache.layers[1].reorder_cache(torch.tensor([2, 0, 1]))
    assert cache.layers[1].keys.shape == (3, 2, 10, 16)
    assert next_logits(ours, ids, cache).isfinite().all()


@pytest.mark.parametrize(("name", "kind"), [("llama", "int8"), ("llama", "fp8"), ("minicpm3", "int8")])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_and_pickles_hold_the_same_codes(name, kind, copied):
    ours, _, ids, cache = held(kind, name=name)
    again = copied(cache)
    assert store_of(again) and store_of(again).shapes == store_of(cache).shapes
    assert torch.equal(next_logits(ours, ids, again), next_logits(ours, ids, cache))


def test_a_cache_goes_from_one_kind_of_model_to_the_other_and_back():
    ours, stock, ids, cache = held()
    exact = accel.optimize(copy.deepcopy(stock))
    logits = next_logits(exact, ids, cache)
    assert [shape.kv_dtype for shape in store_of(cache).shapes] == [None] * 2
    back = next_logits(ours, ids, cache)
    assert [shape.kv_dtype for shape in store_of(cache).shapes] == [torch.int8] * 2
    assert logits.isfinite().all() and back.isfinite().all()
    assert torch.equal(stock(ids).logits, accel.restore(exact)(ids).logits)


def test_calls_that_run_stock_go_on_over_the_same_cache():
    ours, stock, ids, cache = held()
    with rounding(torch.int8):
        theirs = DynamicCache()
        stock(ids, past_key_values=theirs)
        wanted = stock(ids[:, :2], past_key_values=theirs, output_hidden_states=True).logits
    got = ours(ids[:, :2], past_key_values=cache, output_hidden_states=True).logits
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert store_of(cache) and cache.get_seq_length() == 11


def test_a_copy_of_the_model_rounds_too():
    ours, _, ids, _ = held()
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        cache = DynamicCache()
        assert torch.equal(again(ids, past_key_values=cache).logits, ours(ids).logits)
        assert store_of(cache).shapes[0].kv_dtype == torch.int8
