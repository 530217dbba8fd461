"""Long runs, and the caches that they hold."""

import copy
import gc
import os
import time

import pytest
import torch
from accel_kernels import paged_attention
from accel_kernels.attention.paged.kv_quantization import restored, rounded
from accel_kernels.device import Feature, has
from transformers import DynamicCache

import accel
from accel.llm.attention.rotary import SmallStore
from accel.llm.kv_cache.cache import store_of
from accel.llm.runtime.kv_quantization import KV_DTYPES
from support.device_memory import allocated
from support.kernels.code_kernel import run, ties
from support.kernels.waiting import texts_of, waits_noted
from support.llm.calls import random_calls
from support.llm.families import make, padded, prompt
from support.llm.gpu import decode_graphs, new_pair, on_gpu
from support.llm.modes import MODES
from support.llm.outputs import generate, same
from support.llm.rounded_cache import rounding

FAMILIES = ("llama", "llama-mqa", "llama-head-dim-10", "gpt2", "bloom", "gpt-neox", "mistral", "qwen3", "gemma2", "phi")
SOME = ("greedy", "greedy-padded", "greedy-long", "sample", "beam", "assisted", "prompt-lookup", "chunked-prefill",
        "continued-padded", "cropped", "fanned-out")  # fmt: skip
WAITS = ("bloom",)  # stock makes its slopes on the CPU in every forward, which no graph can


pytestmark = pytest.mark.usefixtures("exact")


@pytest.fixture(params=KV_DTYPES)
def kind(request) -> str:
    if request.param == "fp8" and not has(torch.device("cuda"), Feature.FLOAT8):
        pytest.skip("no 8-bit floats here")
    return request.param


def pair(name: str, kind: str, dtype: torch.dtype = torch.float32, **changes):
    """(optimized, stock)."""
    stock = make(name, **changes).to("cuda", dtype)
    return accel.optimize(copy.deepcopy(stock), kv_cache=kind, graphs=True), stock


def inputs(lengths):
    return tuple(t.cuda() for t in padded(lengths))


@pytest.mark.parametrize("name", FAMILIES)
def test_text_is_that_of_stock_over_a_rounded_cache(name, kind):
    """Three times each, so that prompts and steps are replayed."""
    ours, stock = pair(name, kind)
    for mode in (mode for mode in MODES if mode.name in SOME):
        with rounding(KV_DTYPES[kind]):
            theirs = mode(stock, *inputs(mode.lengths))
        for _ in range(3):
            same(mode(ours, *inputs(mode.lengths)), theirs, share=5e-3)
    assert not accel.report(ours).fallbacks
    assert any(row["status"] == "graph" for row in accel.report(ours).graphs) or name in WAITS, accel.report(ours)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_logits_in_half_precision_are_as_exact_as_those_of_stock(name, dtype, kind):
    """Against fp32 over a cache that rounds the same way; stock in half precision over such a cache is the measure."""
    ours, stock = pair(name, kind, dtype, head_dim=64)
    exact = copy.deepcopy(stock).float()
    ids = prompt(3, 80).cuda()

    def logits(model):
        cache, found = DynamicCache(), []
        for piece in (ids[:, :60], *ids[:, 60:].split(1, dim=1)):
            found.append(model(piece, past_key_values=cache).logits.double())
        return torch.cat(found, 1)

    with rounding(KV_DTYPES[kind]):
        truth, theirs = logits(exact), logits(stock)
    for _ in range(2):
        assert (logits(ours) - truth).norm() <= 2 * (theirs - truth).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_numbers_between_two_codes_are_rounded_bit_for_bit_as_the_reference(kind, dtype):
    t = ties(KV_DTYPES[kind], dtype)
    wanted = rounded(t, KV_DTYPES[kind])  # on the CPU
    codes, scales = torch.empty_like(t, dtype=KV_DTYPES[kind], device="cuda"), torch.empty(len(t), device="cuda")
    run(t.cuda(), codes, scales, 4)
    for mine, scale in ((codes, scales), rounded(t.cuda(), KV_DTYPES[kind])):
        assert torch.equal(mine.cpu().float(), wanted[0].float()) and torch.equal(scale.cpu(), wanted[1])


@pytest.mark.parametrize("name", ["llama-decode-8k-int8", "llama-decode-8k-fp8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_decode_kernel_stores_values_between_two_codes_as_the_reference(name, dtype):
    if "fp8" in name and not has(torch.device("cuda"), Feature.FLOAT8):
        pytest.skip("no 8-bit floats here")
    case = next(case for case in paged_attention.cases if case.name == name)
    (q, k, v, kv, scale), kwargs = case.make(torch.device("cuda"), dtype)
    v = ties(kv.values.dtype, dtype, v.shape[:-1].numel(), v.shape[-1]).view(v.shape).cuda()
    paged_attention.triton(q, k, v, kv, scale, **kwargs)
    stored, (codes, scales) = kv.stored(), rounded(v, kv.values.dtype)
    got = kv.read(stored + 1, torch.float32)[1][:, stored:]
    assert torch.equal(got, restored(codes, scales, torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["llama-decode-8k-int8", "llama-decode-8k-fp8", "llama-prefill-int8"])
@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_kernels_attend_to_exactly_what_they_stored(name, size, dtype):
    if "fp8" in name and not has(torch.device("cuda"), Feature.FLOAT8):
        pytest.skip("no 8-bit floats here")
    case = next(case for case in paged_attention.cases if case.name == name)
    (q, k, v, kv, scale), kwargs = case.make(torch.device("cuda"), dtype)
    kv.value_scales.mul_(size)
    stored, new = kv.stored(), q.shape[1]
    got = paged_attention.triton(q, k, v * size, kv, scale, **kwargs)
    keys, values = kv.read(stored + new, torch.float32)
    turned = SmallStore(q)
    turned(q, q, q, 1.0, cos=kwargs["cos"], sin=kwargs["sin"])
    heads = turned.keys.float().transpose(1, 2)
    at = torch.arange(stored, stored + new, device="cuda")
    mask = torch.arange(stored + new, device="cuda") <= at[:, None]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        heads, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask, scale=scale, enable_gqa=True
    )
    wanted = wanted.transpose(1, 2).flatten(2)
    limit = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    assert float((got.float() - wanted).abs().max() / wanted.abs().max()) < limit


def test_a_graph_serves_every_cache_and_every_length(kind):
    ours, _ = pair("llama", kind, max_position_embeddings=2048)
    plain = accel.optimize(copy.deepcopy(ours), kv_cache=kind, graphs=False)
    for length in (9, 9, 9, 200, 600, 40):
        given = inputs((length, length - 3))
        same(generate(ours, *given, max_new_tokens=20), generate(plain, *given, max_new_tokens=20))
    steps = [row for row in accel.report(ours).graphs if "prompt" not in row["inputs"].split(", ")]
    assert len([row for row in steps if row["status"] == "graph"]) == 1


def test_however_a_text_is_cut_its_logits_are_as_exact(kind):
    """A prompt by flash attention over rounded keys, in pieces by our own kernel, and step by step."""
    ours, stock = pair("llama", kind, torch.bfloat16, head_dim=64, max_position_embeddings=2048)
    ids = prompt(2, 700).cuda()

    def last(model, cuts):
        cache = DynamicCache()
        return [model(piece, past_key_values=cache).logits[:, -1].double() for piece in ids.split(cuts, dim=1)][-1]

    with rounding(KV_DTYPES[kind]):
        truth, theirs = last(copy.deepcopy(stock).float(), [700]), last(stock, [700])
    for cuts in ([700], [300, 400], [690] + [1] * 10):
        assert (last(ours, cuts) - truth).norm() <= 2 * (theirs - truth).norm(), cuts


def test_the_cache_takes_half_the_memory(kind):
    peaks = []
    for option in (None, kind):
        model = accel.optimize(make("llama", head_dim=128, num_hidden_layers=4, max_position_embeddings=20000)
                               .to("cuda", torch.bfloat16), kv_cache=option)  # fmt: skip
        cache = DynamicCache()
        model(prompt(4, 16).cuda(), past_key_values=cache)
        before = allocated()
        store_of(cache).reserve(4, 16000)
        peaks.append(allocated() - before)
        del model, cache
    assert 0.5 < peaks[1] / peaks[0] < 0.53


def waits(model, new: int, **call) -> int:
    """How often the host waits for the GPU in one call of generate."""
    lengths = (9, 5) if call.pop("pad", False) else (9,)
    ids, mask = on_gpu(*padded(lengths))
    with waits_noted() as seen:
        model.generate(ids, attention_mask=mask, **({"do_sample": False, "max_new_tokens": new} | call))
    return len(texts_of(seen))


@pytest.mark.parametrize(
    "call",
    [{}, {"pad": True}, {"do_sample": True, "top_k": 5, "top_p": 0.9}, {"num_beams": 3}, {"eos_token_id": [98]}],
    ids=str,
)
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_a_word_waits_for_the_stopping_check_alone(name, call):
    """Beams wait as often as stock's do."""
    ours, stock = new_pair(name, torch.bfloat16)
    for _ in range(3):
        waits(ours, 24, **call)
    few, many = (waits(ours, new, **call) for new in (4, 24))
    per_word = (many - few) / 20
    stocks = (waits(stock, 24, **call) - waits(stock, 4, **call)) / 20
    assert stocks > 0, "the debug mode does not tell"
    assert per_word <= 1 or ("num_beams" in call and per_word <= stocks), (per_word, stocks)


def test_a_thousand_calls_of_random_lengths_hold_nothing():
    ours, _stock = new_pair("llama", torch.bfloat16)
    ways = ({}, {}, {"do_sample": True}, {"num_beams": 2})
    for ids, mask, call in random_calls(400, 0, ways, 90, 3, 6):  # each length of prompts twice, for its graph
        generate(ours, *on_gpu(ids, mask), **call)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for ids, mask, call in random_calls(1000, 1, ways, 90, 3, 6):
        generate(ours, *on_gpu(ids, mask), **call)
    gc.collect()
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert after[0] <= before[0] + 2**20 and after[1] <= before[1] + 2**25, (before, after)
    assert decode_graphs(ours)


def test_no_call_stalls_over_a_new_length_or_batch():
    """After the first calls; a steady one takes some milliseconds."""
    ours, _ = new_pair("llama", torch.bfloat16, max_position_embeddings=4096)
    ids = prompt(1, 9).cuda()
    for _ in range(3):
        ours.generate(ids, max_new_tokens=8, do_sample=False)
    slow = []
    for rows, length, new in ((1, 40, 8), (1, 700, 8), (1, 20, 100), (2, 9, 8), (2, 33, 8), (2, 9, 8), (4, 100, 8),
                              (4, 9, 9), (3, 11, 5), (8, 9, 8), (8, 9, 8), (1, 1900, 8), (1, 9, 8)):  # fmt: skip
        ids = prompt(rows, length).cuda()
        torch.cuda.synchronize()
        start = time.perf_counter()
        ours.generate(ids, max_new_tokens=new, do_sample=False)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        if seconds > 0.5 + 0.01 * new:
            slow.append((rows, length, new, seconds))
    assert slow == []


def test_a_cache_that_grows_does_not_stall():
    """Asked for word by word, so that nobody could know how long it becomes."""
    ours, stock = new_pair("llama", max_position_embeddings=4096)
    output, theirs, slowest = None, None, 0.0
    for step in range(700):
        word = prompt(1, 9 if step == 0 else 1, step).cuda()
        torch.cuda.synchronize()
        start = time.perf_counter()
        output = ours(word, past_key_values=output.past_key_values if output else None)
        torch.cuda.synchronize()
        if step > 3:
            slowest = max(slowest, time.perf_counter() - start)
        theirs = stock(word, past_key_values=theirs.past_key_values if theirs else None)
        if step % 100 == 0:
            same({"logits": output.logits}, {"logits": theirs.logits}, 4e-5)
    assert slowest < 0.3


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="what tests before it left free would serve the cache")
def test_out_of_memory_leaves_model_and_cache_usable():
    ours, stock = new_pair("llama", max_position_embeddings=2**20)
    ids = prompt(1, 9).cuda()
    for _ in range(3):
        generate(ours, ids, None)
    kept, theirs = ours(ids), stock(ids)
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**28) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="no memory for keys and values of 20000 tokens in 64 rows"):
            ours(prompt(64, 20000).cuda())
        with pytest.raises(torch.OutOfMemoryError, match="in 1 rows: .* the 9 stored are kept"):
            ours(prompt(1, 2**20).cuda(), past_key_values=kept.past_key_values)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    same(generate(ours, ids, None), generate(stock, ids, None))
    word = prompt(1, 1, 3).cuda()
    mine, wanted = ours(word, past_key_values=kept.past_key_values), stock(word, past_key_values=theirs.past_key_values)
    same({"logits": mine.logits}, {"logits": wanted.logits}, 4e-5)


def test_the_memory_of_a_cache_is_what_the_call_asks_for():
    """Not what the model could take: a small request of a model with a very long context."""
    ours, stock = new_pair("llama", max_position_embeddings=2**18)
    ids = prompt(4, 50).cuda()
    peaks = []
    for model in (stock, ours):
        for _ in range(3):
            model.generate(ids, max_new_tokens=20, do_sample=False)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        model.generate(ids, max_new_tokens=20, do_sample=False)
        peaks.append(torch.cuda.max_memory_allocated() - held)
    assert peaks[1] <= peaks[0] + 2**22, peaks
