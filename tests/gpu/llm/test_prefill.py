"""Short prompts on a GPU: one graph a length they are filled up to, never stale, as exact as stock, without waits."""

import copy
import gc
import inspect
import time
import warnings

import pytest
import torch
from accel_kernels import OPS

import accel
from accel.llm.generation import prefill as short
from accel.llm.generation.prefill import MOST, STEP, bucket_for
from support.llm.families import BY_NAME, FAMILIES, available, make, padded, prompt
from support.llm.outputs import generate, same

FAST = [family.name for family in FAMILIES if family.expected == "fast"]
SOME = ("llama", "gpt2", "mistral", "gemma2", "falcon-alibi", "phi", "gptj", "qwen3")
WAITS = ("llama-rope-dynamic", "phi3-longrope")  # stock reads the greatest position in every forward


pytestmark = pytest.mark.usefixtures("exact")


def new_pair(name: str, dtype: torch.dtype = torch.float32, **changes):
    """(optimized, stock)."""
    if not available(BY_NAME[name].kind):
        pytest.skip(f"this transformers has no {BY_NAME[name].kind}")
    stock = make(name, **changes).to("cuda", dtype)
    return accel.optimize(copy.deepcopy(stock), graphs=True), stock


def graphs(model) -> list[dict]:
    """Rows of the report for prompts that are replayed."""
    rows = accel.report(model).graphs
    return [row for row in rows if row["status"] == "graph" and "prompt" in row["inputs"].split(", ")]


def cache_of(model):
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def talk(model, ids, mask=None, steps: int = 3) -> dict:
    """Logits of a prompt's last token and of given words after it."""
    cache, found = cache_of(model), {}
    takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
    mask = torch.ones_like(ids) if mask is None else mask
    for step in range(steps + 1):
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        given = {"position_ids": positions} if takes_positions else {}
        output = model(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1, **given)
        found[f"{step}"] = output.logits
        ids = prompt(len(ids), 1, 40 + step).cuda()
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    return found


def on_gpu(*tensors):
    return tuple(tensor.cuda() for tensor in tensors)


# -- as exact as stock -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FAST)
def test_logits_are_as_near_to_the_truth_as_stocks(name, dtype):
    """Against the same weights in float32; the root mean square over many prompts, at most twice stock's own."""
    ours, stock = new_pair(name, dtype)
    wide = copy.deepcopy(stock).float()
    talks = [on_gpu(*padded(lengths, seed)) for seed, lengths in enumerate([(9,), (16,), (50,), (90,), (40, 33)])]

    def logits(model):
        return torch.cat([one.flatten().float() for ids, mask in talks for one in talk(model, ids, mask).values()])

    truth = logits(wide)
    allowed = float((logits(stock) - truth).pow(2).mean().sqrt())
    for _ in range(3):  # eager, capture, replay
        error = float((logits(ours) - truth).pow(2).mean().sqrt())
        assert error <= 2 * allowed + 1e-6, f"{error:.2e}, stock's own {allowed:.2e}"
    assert "forward" in vars(ours), accel.report(ours)
    fills = vars(ours)["forward"].convention.fills
    assert bool(graphs(ours)) == (fills and name not in WAITS), accel.report(ours)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 64, 65, 100, 124])
@pytest.mark.parametrize("name", SOME)
def test_logits_in_float32(name, length):
    ours, stock = new_pair(name)
    for seed in range(3):
        ids = prompt(1, length, seed).cuda()
        same(talk(ours, ids), talk(stock, ids), 4e-5)
    assert len(graphs(ours)) == 1, accel.report(ours)


@pytest.mark.parametrize("lengths", [(9, 5), (16, 1, 7), (40, 64), (30, 30)], ids=str)
@pytest.mark.parametrize("name", SOME)
def test_padded_on_the_left(name, lengths):
    ours, stock = new_pair(name)
    for seed in range(3):
        ids, mask = on_gpu(*padded(lengths, seed))
        same(talk(ours, ids, mask), talk(stock, ids, mask), 4e-5)
    (row,) = graphs(ours)
    assert row["inputs"].endswith("prompt" if len(set(lengths)) == 1 else "prompt, mask")


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SOME)
def test_bit_for_bit_whatever_it_is_filled_up_with(name, dtype, value, monkeypatch):
    """All in one graph: the prompt, the step after it, and what the cache holds."""
    ours, _ = new_pair(name, dtype)
    whole, found = short.pad_to_bucket, []

    def other(tokens, positions, room):
        new = tokens.shape[1]
        tokens, positions, last = whole(tokens, positions, room)
        tokens[:, new:] = value
        return tokens, positions, last

    embeds = ours.get_input_embeddings()(prompt(2, 21).cuda())
    for fill in (whole, whole, whole, other, whole):
        monkeypatch.setattr(short, "pad_to_bucket", fill)
        cache = cache_of(ours)
        first = ours(inputs_embeds=embeds, past_key_values=cache, logits_to_keep=1).logits
        then = ours(prompt(2, 1, 3).cuda(), past_key_values=cache).logits
        held = [t.clone() for layer in cache.layers for t in (layer.keys, layer.values)]
        assert all(t.shape[2] == 22 and t.isfinite().all() for t in held)
        found.append([first, then, *held])
    assert len(graphs(ours)) == 1
    for one in found[3:]:
        assert all(map(torch.equal, one, found[2]))


CASES = [case for op in OPS if op.name == "paged_attention" for case in op.cases if "prefill" in case.name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if "more" not in case.name and "all" not in case.name],
                         ids=lambda case: case.name)  # fmt: skip
def test_the_kernel_reads_the_blocks_by_their_addresses(case, dtype):
    """Keys and values that it is shown besides are another store's."""
    op = next(op for op in OPS if op.name == "paged_attention")
    (*qkv, theirs, scale), kwargs = case.make(torch.device("cuda"), torch.float64)
    truth = op.reference(*qkv, theirs, scale, **kwargs)
    (*qkv, theirs, scale), kwargs = case.make(torch.device("cuda"), dtype)
    stock = op.reference(*qkv, theirs, scale, **kwargs)
    (*qkv, mine, scale), kwargs = case.make(torch.device("cuda"), dtype)
    nothing = float("nan") if mine.keys.is_floating_point() else 99
    for held in (mine.keys, mine.values):
        held.fill_(nothing)  # whatever lay there before
    shown = {name: torch.full_like(getattr(mine, name), nothing) for name in ("keys", "values")}
    ours = op.triton(*qkv, mine._replace(is_prefill=True, by_address=True, **shown), scale, **kwargs)
    errors = [float((got.double() - truth).pow(2).mean().sqrt()) for got in (ours, stock)]
    assert errors[0] <= 2 * errors[1] + 1e-7, errors
    assert all((t.isnan() if t.is_floating_point() else t == nothing).all() for t in shown.values())


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_one_graph_for_all_lengths_up_to_its_own():
    ours, stock = new_pair("llama", max_position_embeddings=2048)
    for length in (33, 40, 64, 50, 63):
        ids = prompt(1, length, length).cuda()
        same(talk(ours, ids), talk(stock, ids), 4e-5)
    assert len(graphs(ours)) == 1, accel.report(ours)
    for length in (65, 128, 100):
        ids = prompt(1, length, length).cuda()
        same(talk(ours, ids), talk(stock, ids), 4e-5)
    assert len(graphs(ours)) == 2, accel.report(ours)
    assert accel.report(ours).fallbacks == []


def test_generate_uses_them():
    ours, stock = new_pair("llama", max_position_embeddings=2048)
    for length, call in ((9, {}), (12, {"num_beams": 3}), (300, {"do_sample": True}), (9, {"max_new_tokens": 80})):
        for seed in range(3):
            ids, mask = on_gpu(*padded((length,), seed))
            same(generate(ours, ids, mask, **call), generate(stock, ids, mask, **call))
    rows = {row["inputs"].split(",")[0] for row in graphs(ours)}
    assert rows == {"1x16", "3x16", "1x320"}, accel.report(ours)


def test_longer_prompts_and_all_logits_are_read_as_before():
    ours, stock = new_pair("llama", max_position_embeddings=2 * MOST)
    for _ in range(3):
        ids = prompt(1, MOST + 1).cuda()
        same(talk(ours, ids), talk(stock, ids), 4e-5)
        same({"all": ours(ids[:, :20]).logits}, {"all": stock(ids[:, :20]).logits}, 4e-5)
    assert graphs(ours) == []


def test_where_graphs_are_kept_only_if_they_gain():
    """Each length is timed both ways at its second prompt; whatever comes of it, what follows is what stock says."""
    stock = make("llama", max_position_embeddings=MOST).cuda()
    ours = accel.optimize(copy.deepcopy(stock))
    for length in (40, 1500, 2048, 3000, 3000, 1500, 40):
        for seed in range(4):
            ids = prompt(1, length - seed, seed).cuda()
            same(talk(ours, ids), talk(stock, ids), 4e-5)
    tried = [row for row in accel.report(ours).graphs if "prompt" in row["inputs"].split(", ")]
    assert any(row["status"] == "graph" for row in tried), tried
    for row in tried:
        assert row["status"] == "graph" or "gains nothing" in row["reason"] or "seen once" in row["reason"], row


def test_nothing_is_stale():
    """Caches in turn, weights changed in place, weights exchanged, a model moved away and back."""
    ours, stock = new_pair("llama")
    for seed in range(10):
        ids = prompt(1, 17 + seed, seed).cuda()
        same(talk(ours, ids), talk(stock, ids), 4e-5)
        for model in (ours, stock):
            layer = model.model.layers[0]
            if seed == 3:
                layer.mlp.down_proj.weight.mul_(1.5)
            elif seed == 4:
                layer.self_attn.o_proj.weight = torch.nn.Parameter(layer.self_attn.o_proj.weight * 0.5)
            elif seed == 6:
                model.cpu().cuda()
    assert graphs(ours)


def test_hooks_see_the_prompt_as_it_is():
    ours, stock = new_pair("llama")
    seen = []
    for _ in range(3):
        talk(ours, prompt(1, 20).cuda())
    assert graphs(ours)
    handle = ours.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, args, y: seen.append(y.shape[1]))
    for _ in range(3):
        same(talk(ours, prompt(1, 20).cuda(), steps=0), talk(stock, prompt(1, 20).cuda(), steps=0), 4e-5)
    assert seen == [20, 20, 20]
    handle.remove()
    for _ in range(3):
        same(talk(ours, prompt(1, 20).cuda()), talk(stock, prompt(1, 20).cuda()), 4e-5)
    assert graphs(ours) and len(seen) == 3


def test_outputs_are_never_aliased():
    ours, _ = new_pair("llama")
    kept = []
    for seed in range(6):
        logits = ours(prompt(1, 20 + seed, seed).cuda(), logits_to_keep=1).logits
        kept.append((logits, logits.clone()))
    assert graphs(ours) and all(torch.equal(*pair) for pair in kept)


def test_two_models_and_their_copies_keep_apart():
    ours, stock = new_pair("llama")
    for _ in range(3):
        talk(ours, prompt(1, 20).cuda())
    twin = copy.deepcopy(ours)
    twin.model.layers[1].mlp.up_proj.weight.mul_(2.0)
    theirs = copy.deepcopy(stock)
    theirs.model.layers[1].mlp.up_proj.weight.mul_(2.0)
    for seed in range(3):
        ids = prompt(1, 18, seed).cuda()
        same(talk(twin, ids), talk(theirs, ids), 4e-5)
        same(talk(ours, ids), talk(stock, ids), 4e-5)


# -- time and memory ---------------------------------------------------------------------------------------------------


def rooms() -> list[int]:
    return sorted({bucket_for(1, new) for new in range(1, MOST + 1)})


def test_no_prompt_stalls_over_its_graph():
    """Neither the first of a length, nor the second, which captures; a steady one takes some milliseconds."""
    ours, _ = new_pair("llama", torch.bfloat16, max_position_embeddings=4096)
    for _ in range(3):
        generate(ours, prompt(1, 9).cuda(), None)
    slow = []
    for masked in (False, True):
        for room in rooms():
            for turn in range(3):
                ids, mask = prompt(1, room).cuda(), torch.ones(1, room, dtype=torch.long, device="cuda")
                mask[0, 0] = not masked
                torch.cuda.synchronize()
                start = time.perf_counter()
                ours(ids, attention_mask=mask, position_ids=mask.cumsum(1) - mask, logits_to_keep=1)
                torch.cuda.synchronize()
                if time.perf_counter() - start > 0.5:
                    slow.append((room, masked, turn, time.perf_counter() - start))
    assert slow == [] and len(graphs(ours)) == 2 * len(rooms())


def test_a_prompt_without_a_mask_never_waits():
    ours, _ = new_pair("llama", torch.bfloat16)
    ids = prompt(1, 20).cuda()
    for _ in range(3):
        ours(ids, logits_to_keep=1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            ours(ids, logits_to_keep=1)
            replayed = len(seen)
            ids.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(seen) > replayed, "the debug mode does not tell"
    waits = [str(warning.message) for warning in seen[:replayed] if "synchroniz" in str(warning.message)]
    # The store's addresses are copied to the GPU when it is made, as for any prompt.
    assert len(waits) <= len({shape.device for shape in vars(ours)["forward"].shapes()}), waits


def test_memory_is_flat_and_holds_no_logits_of_the_filling():
    vocabulary = 50_000
    ours, _ = new_pair("llama", torch.bfloat16, vocab_size=vocabulary, max_position_embeddings=MOST)
    for room in rooms():
        for _ in range(3):
            ours(prompt(1, room).cuda(), logits_to_keep=1)
    assert len(graphs(ours)) == len(rooms())
    # The activations of the longest, the libraries' workspace and a row of logits each; all logits were 835 MB.
    assert sum(row["memory_mb"] for row in graphs(ours)) < 200, accel.report(ours)

    def held():
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    before = held()
    g = torch.Generator().manual_seed(0)
    for seed in range(300):
        ours(prompt(1, int(torch.randint(1, MOST + 1, (), generator=g)), seed).cuda(), logits_to_keep=1)
    after = held()
    assert after[0] <= before[0] + 2**16 and after[1] <= before[1] + 2**25, (before, after)
    assert len(graphs(ours)) == len(rooms()) <= MOST // STEP + 2


def test_restored_the_memory_is_given_back():
    ours, stock = new_pair("llama")
    for _ in range(3):
        talk(ours, prompt(1, 40).cuda())
    assert graphs(ours)
    accel.restore(ours)
    assert accel.report(ours).graphs == []
    gc.collect()
    held = torch.cuda.memory_allocated()
    accel.optimize(ours, graphs=True)
    for _ in range(3):
        same(talk(ours, prompt(1, 40).cuda()), talk(stock, prompt(1, 40).cuda()), 4e-5)
    accel.restore(ours)
    gc.collect()
    assert torch.cuda.memory_allocated() <= held + 2**16
