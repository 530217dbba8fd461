"""Language models on a GPU: graphs are really used and never stale, nothing waits for the device, memory is flat."""

import copy
import gc
import inspect
import threading
import time
import warnings

import pytest
import torch

import accel
from support.llm.changes import CHANGES
from support.llm.families import BY_NAME, FAMILIES, available, make, padded, prompt
from support.llm.modes import MODES
from support.llm.outputs import flat, generate, same
from support.llm.walks import walk

CORE = [family.name for family in FAMILIES if family.core]
FAST = [family.name for family in FAMILIES if family.expected == "fast"]
MODE = {mode.name: mode for mode in MODES}
HALF = (torch.bfloat16, torch.float16)
# What stock does on the host in every forward, and no graph can: it reads the greatest position, makes slopes (Bloom)
# or frequencies (Phi-MoE) on the CPU, or, called outside of generate(), groups tokens by expert there.
WAITS = ("llama-rope-dynamic", "phi3-longrope", "bloom", "phi-moe", "gpt-oss")


pytestmark = pytest.mark.usefixtures("exact")


def new_pair(name: str, dtype: torch.dtype = torch.float32, **changes):
    """(optimized, stock)."""
    if not available(BY_NAME[name].kind):
        pytest.skip(f"this transformers has no {BY_NAME[name].kind}")
    stock = make(name, **changes).to("cuda", dtype)
    return accel.optimize(copy.deepcopy(stock), graphs=True), stock


def on_gpu(*tensors):
    return tuple(None if tensor is None else tensor.cuda() for tensor in tensors)


def graphs(model) -> list[dict]:
    """Rows of the report for decode steps that are replayed; test_prefill.py has those of prompts."""
    captured = (row for row in accel.report(model).graphs if row["status"] == "graph")
    return [row for row in captured if "prompt" not in row["inputs"].split(", ")]


def conversation(model, steps: int = 5, seed: int = 0) -> torch.Tensor:
    """Logits of a left-padded prompt and of given words after it; every row of them is of a word that is seen."""
    ids, mask = on_gpu(*padded((11, 6), seed=seed))
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
    found, cache = [], None
    for step in range(steps + 1):
        if step:
            ids = prompt(2, 1, 10 * seed + step).cuda()
            mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
            positions = mask.sum(1, keepdim=True) - 1
        given = {"position_ids": positions} if takes_positions else {}
        output = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True, **given)
        cache = output.past_key_values
        found.append(output.logits[mask.bool()[:, -ids.shape[1] :]])
    return torch.cat(found)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in FAST), *((name, torch.float16) for name in CORE)], ids=str
)
def test_logits_are_as_near_to_the_truth_as_stocks(name, dtype):
    """Against the same weights in float32; the root mean square, at most twice stock's own.

    Of the median token where rounding may send some to other experts, in stock as in ours: those have little in common
    with the truth, and who has more of them is chance.
    """
    ours, stock = new_pair(name, dtype)
    assert "forward" in vars(ours), accel.report(ours)
    chooses = any(not layer.spec.mlp.first for layer in vars(ours)["forward"].layers)
    wide = copy.deepcopy(stock).float()
    truth = [conversation(wide, seed=seed) for seed in range(3)]

    def off(model) -> float:
        found = [conversation(model, seed=seed) for seed in range(3)]  # eager, capture, replay
        assert found[0].dtype == dtype
        squares = torch.cat([(a.float() - b).pow(2).mean(-1) for a, b in zip(found, truth, strict=True)])
        return float((squares.median() if chooses else squares.mean()).sqrt())

    allowed = off(stock)
    for _ in range(2):
        error = off(ours)
        assert error <= 2 * allowed + 1e-6, f"{error:.2e}, stock's own {allowed:.2e}"
    assert graphs(ours) or name in WAITS, accel.report(ours)


@pytest.mark.parametrize("name", FAST)
def test_logits_in_float32(name):
    ours, stock = new_pair(name)
    for seed in range(3):
        same({"logits": conversation(ours, seed=seed)}, {"logits": conversation(stock, seed=seed)}, 4e-5)
    assert graphs(ours) or name in WAITS, accel.report(ours)


@pytest.fixture(scope="module")
def pair_of():
    made = {}

    def pair(name):
        if name not in made:
            made.clear()  # one at a time
            made[name] = new_pair(name)
        return made[name]

    return pair


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", CORE)
def test_mode(name, mode, pair_of):
    """Token for token in float32."""
    ours, stock = pair_of(name)
    inputs = on_gpu(*padded(mode.lengths))
    try:
        theirs = mode(stock, *inputs)
    except (ValueError, TypeError, AttributeError, RuntimeError, IndexError):
        pytest.skip("stock cannot do this itself")
    for _ in range(2):
        same(mode(ours, *inputs), theirs, 4e-5)


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_one_graph_serves_every_length():
    ours, stock = new_pair("llama", max_position_embeddings=2048)
    for _ in range(3):
        generate(ours, *on_gpu(*padded((9,))))
    captured = len(graphs(ours))
    assert captured == 1, accel.report(ours)
    for length, new in ((30, 20), (5, 60), (300, 100), (1, 3)):
        ids, mask = on_gpu(*padded((length,)))
        same(generate(ours, ids, mask, max_new_tokens=new), generate(stock, ids, mask, max_new_tokens=new))
    assert len(graphs(ours)) == captured
    assert accel.report(ours).fallbacks == []


def test_two_caches_in_turn_through_one_graph():
    """Two conversations of one shape, a step of one and a step of the other."""
    from transformers import DynamicCache

    def talk(model):
        caches, found = [DynamicCache(config=model.config) for _ in range(2)], {}
        for number, cache in enumerate(caches):
            found[f"{number}"] = model(prompt(1, 6 + 9 * number, number).cuda(), past_key_values=cache).logits
        for step in range(10):
            if step == 6:  # the first is dropped; its memory may be given to another
                caches[0] = DynamicCache(config=model.config)
                found["new"] = model(prompt(1, 5, 50).cuda(), past_key_values=caches[0]).logits
            word = prompt(1, 1, step).cuda()
            found[f"then {step}"] = model(word, past_key_values=caches[step % 2]).logits
        return found

    ours, stock = new_pair("llama")
    for _ in range(2):
        same(talk(ours), talk(stock), 4e-5)
    assert graphs(ours)


def test_outputs_are_never_aliased():
    ours, _ = new_pair("llama")
    for _ in range(3):
        kept, output = [], None
        for step in range(6):
            cache = output.past_key_values if output else None
            output = ours(prompt(1, 5 if step == 0 else 1, step).cuda(), past_key_values=cache)
            kept.append((output.logits, output.logits.clone()))
        assert all(torch.equal(*pair) for pair in kept)
    assert graphs(ours)


@pytest.mark.parametrize("name", ["llama-rope-dynamic", "phi3-longrope"])
def test_frequencies_that_change_with_the_length(name):
    """A graph must not keep those it was captured with."""
    ours, stock = new_pair(name)
    for length, new in ((4, 20), (4, 20), (9, 3), (30, 10), (4, 4), (4, 30)):
        ids = prompt(1, length, length).cuda()
        same(generate(ours, ids, None, max_new_tokens=new), generate(stock, ids, None, max_new_tokens=new))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_a_random_walk(name, seed, pair_of):
    """Of everything that may be done with a cache, through graphs."""
    walk(*pair_of(name), seed, steps=30, share=1e-4)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_changed_model_never_replays_the_old_graph(change):
    if change.only and "llama" not in change.only:
        pytest.skip("not for llama")
    if "dropout" in change.name:
        pytest.skip("drops at random, in stock too: a new adapter is in training mode")
    ours, stock = new_pair("llama")
    for model in (ours, stock):
        model.family = "llama"
    ids, mask = on_gpu(*padded())
    call = {"max_new_tokens": 5, "output_logits": True, "return_dict_in_generate": True}
    for _ in range(3):
        generate(ours, ids, mask, **call)
    assert graphs(ours)
    for step in (*change.steps, *filter(None, [change.reverse])):
        ours, stock = (step(model) or model for model in (ours, stock))
        theirs = generate(stock, ids, mask, **call)
        for _ in range(3):
            mine = generate(ours, ids, mask, **call)
            if change.slack == 1:
                same(mine, theirs, 4e-5)
            else:
                error = float((mine["logits.0"] - theirs["logits.0"]).abs().max())
                assert error <= change.slack * 1e-5 * float(theirs["logits.0"].abs().max())


# -- waiting for the device --------------------------------------------------------------------------------------------


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


# -- for long ----------------------------------------------------------------------------------------------------------


def random_calls(count: int, seed: int = 0):
    g = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high + 1, (), generator=g))

    ways = ({}, {}, {"do_sample": True}, {"num_beams": 2})
    for _ in range(count):
        ids, mask = padded([number(1, 90) for _ in range(number(1, 3))], seed=number(0, 99))
        yield *on_gpu(ids, mask), {"max_new_tokens": number(1, 6)} | ways[number(0, 3)]


def test_a_thousand_calls_of_random_lengths_hold_nothing():
    ours, stock = new_pair("llama", torch.bfloat16)
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
    assert graphs(ours)


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


@pytest.mark.parametrize("kind", ["static", "offloaded"])
def test_a_cache_asked_for_by_name_is_stocks(kind):
    """As users ask for it: generate() compiles the forward for a static one.

    Tokens from an offloaded one are not compared: with other work on the GPU those of stock are not its own either.
    """
    ours, stock = new_pair("llama")
    ids, mask = on_gpu(*padded((9, 5)))
    for _ in range(2):
        mine, theirs = (generate(model, ids, mask, cache_implementation=kind) for model in (ours, stock))
        if kind == "static":
            same(mine, theirs)
    assert any("cache" in reason for _, reason, _ in accel.report(ours).fallbacks), accel.report(ours).fallbacks
    same(generate(ours, ids, mask), generate(stock, ids, mask))


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


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_threads_that_generate_at_once(name):
    """On streams of their own, through the same graphs."""
    ours, stock = new_pair(name)
    jobs = [on_gpu(*padded(lengths, seed=i)) for i, lengths in enumerate([(9,), (9,), (9, 5), (7, 8, 6), (9,)])]

    def call(model, ids, mask, new=12):
        return flat(model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False))

    wanted = [call(stock, *job) for job in jobs]
    for job in jobs[:3]:
        call(ours, *job)
    torch.cuda.synchronize()
    start, errors = threading.Barrier(len(jobs)), []

    def work(job, result):
        try:
            start.wait()
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(6):
                    same(call(ours, *job), result)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(jobs, wanted, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("name", CORE)
def test_restore_is_exact_and_gives_the_memory_back(name, tiny):
    model, stock = (make(name).cuda() for _ in range(2))
    ids, mask = on_gpu(*padded())
    before = tiny.snapshot(model)
    accel.optimize(model, graphs=True)
    for _ in range(3):
        generate(model, ids, mask)
    accel.restore(model)
    tiny.assert_same_state(before, tiny.snapshot(model))
    assert torch.equal(model(ids).logits, stock(ids).logits)
    gc.collect()
    held = torch.cuda.memory_allocated()
    accel.optimize(model, graphs=True)
    for _ in range(3):
        generate(model, ids, mask)
    accel.restore(model)
    gc.collect()
    assert torch.cuda.memory_allocated() <= held + 2**16


def test_moved_to_the_cpu_and_back():
    ours, stock = new_pair("llama")
    ids, mask = on_gpu(*padded())
    wanted = generate(stock, ids, mask)
    for _ in range(3):
        same(generate(ours, ids, mask), wanted)
    ours.cpu()
    same({k: v.cuda() for k, v in generate(ours, ids.cpu(), mask.cpu()).items()}, wanted)
    ours.cuda()
    for _ in range(3):
        same(generate(ours, ids, mask), wanted)
