"""Language models on a GPU for long: nothing waits for the device, no call stalls, memory is flat."""

import gc
import time
import warnings

import pytest
import torch

from support.llm.families import padded, prompt
from support.llm.gpu import decode_graphs, new_pair, on_gpu
from support.llm.outputs import generate, same

pytestmark = pytest.mark.usefixtures("exact")


def waits(model, new: int, **call) -> int:
    """How often the host waits for the GPU in one call of generate."""
    lengths = (9, 5) if call.pop("pad", False) else (9,)
    ids, mask = on_gpu(*padded(lengths))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model.generate(ids, attention_mask=mask, **({"do_sample": False, "max_new_tokens": new} | call))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in seen)


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


def random_calls(count: int, seed: int = 0):
    g = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high + 1, (), generator=g))

    ways = ({}, {}, {"do_sample": True}, {"num_beams": 2})
    for _ in range(count):
        ids, mask = padded([number(1, 90) for _ in range(number(1, 3))], seed=number(0, 99))
        yield *on_gpu(ids, mask), {"max_new_tokens": number(1, 6)} | ways[number(0, 3)]


def test_a_thousand_calls_of_random_lengths_hold_nothing():
    ours, _stock = new_pair("llama", torch.bfloat16)
    for ids, mask, call in random_calls(400):  # each length of prompts twice, for its graph
        generate(ours, ids, mask, **call)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for ids, mask, call in random_calls(1000, 1):
        generate(ours, ids, mask, **call)
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
