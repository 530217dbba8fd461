"""Models of every family and the one that is shipped: the same text as stock."""

import copy
import inspect

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import accel
from support.everything import EVERYTHING, always
from support.llm.edits.places import lora
from support.llm.families import BY_NAME, FAMILIES, every, layers, make, padded
from support.llm.held_out import CALIBRATION, FOLDER, HELD_OUT
from support.llm.modes import MODES
from support.llm.outputs import generate, same
from support.llm.walks import walk
from support.noted import code_runs

PRODUCT = [  # or every family and, as there are more families, every mode
    (family.name, mode)
    for i, family in enumerate(FAMILIES)
    for j, mode in enumerate(MODES)
    if EVERYTHING or j == i % len(MODES)
]
assert len(MODES) <= len(FAMILIES)
NAMES = [family.name for family in FAMILIES]
FAST = [family.name for family in FAMILIES if family.expected == "fast"]
# What stock itself cannot do with some of the families that we must have fast; ours may.
REFUSED = {"early-exit", "static", "static-object", "cropped"}
# What it says of that which it does with no model of a family.
NEVER = (
    "stateful models",
    "have its forwarding implemented",
    "has no attribute 'batch_",
    "list index out of range",
    "ecoding requires a cache",  # of a class of its own, which generate() does not make
    "prefill chunking without a cache",
    "uses cache of its own",
    "Sizes of tensors must match except in dimension 2",  # where keys and values are repeated, and states are not
    "(8) must match the size of tensor b (6)",
)  # candidates by chunks before 5.24
# These must be fast from beginning to end.
ALL_FAST = ("greedy", "greedy-padded", "greedy-ends", "sample-top", "beam", "assisted", "prompt-lookup", "continued",
            "chunked-prefill", "embeddings", "streamer", "inference-mode")  # fmt: skip
RECORDS = {(name, mode) for name in ("lfm2",) for mode in ("assisted", "prompt-lookup")}  # of inputs, which is stock's


def outcome(mode, model, ids, mask):
    """What comes back, or what is raised."""
    try:
        return mode(model, ids, mask)
    except (ValueError, TypeError, AttributeError, RuntimeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(("name", "mode"), PRODUCT, ids=str)
@pytest.mark.share(1)
@pytest.mark.turns(6)
def test_mode(name, mode, pair_of):
    ours, stock = pair_of(name)
    inputs = padded(mode.lengths)
    theirs = outcome(mode, stock, *inputs)
    before = accel.report(ours).fallbacks
    mine = outcome(mode, ours, *inputs)
    if BY_NAME[name].expected in ("fast", "around") and mode.name in ALL_FAST and (name, mode.name) not in RECORDS:
        assert accel.report(ours).fallbacks == before
    if isinstance(theirs, str):
        refused = mode.name in REFUSED or any(words in theirs for words in NEVER)
        assert BY_NAME[name].expected != "fast" or refused, theirs
        assert mine == theirs or not isinstance(mine, str)
    else:
        assert not isinstance(mine, str), mine
        same(mine, theirs)


def runs(model, action) -> int:
    """How often a decoder layer's own forward runs meanwhile, by whatever way it is called."""
    codes = {inspect.unwrap(type(layer).forward).__code__ for layer in layers(model).values()}
    return code_runs(codes, action)


@pytest.mark.parametrize("name", always(NAMES, "gpt-neox", "granite"))
@pytest.mark.share(8)
@pytest.mark.turns(2)
def test_what_is_fast_is_so_and_what_is_stock_says_why(name, pair_of):
    ours, stock = pair_of(name)
    ids, mask = padded()
    sites = accel.report(ours).sites
    own = [site for site in sites if site[0] in layers(ours)]
    assert runs(stock, lambda: generate(stock, ids, mask)) > 0
    count = runs(ours, lambda: generate(ours, ids, mask))
    if BY_NAME[name].expected in ("fast", "around"):
        assert count == 0, [site for site in sites if site[2] == "skipped"]
        assert {path for path, _, status, _ in own if status == "patched"} == set(layers(ours))
    elif BY_NAME[name].expected == "some":
        fused = {path for path, _, status, _ in own if status == "patched"}
        calls = runs(stock, lambda: generate(stock, ids, mask))
        assert 0 < len(fused) < len(layers(ours)) and count == calls * (1 - len(fused) / len(layers(ours)))
    elif BY_NAME[name].expected == "stock":
        assert count > 0
        assert not [site for site in own if site[2] == "patched"]
        assert [site for site in sites if site[2] == "skipped" and site[3]]


def test_beside_a_lora_that_is_not_merged_all_stays_fused(pair):
    ours, stock = pair("llama")
    for model in (ours, stock):
        lora("style")(model)
    ids, mask = padded()
    wanted = generate(stock, ids, mask)
    assert runs(ours, lambda: same(generate(ours, ids, mask), wanted)) == 0 and accel.report(ours).fallbacks == []


@pytest.mark.parametrize("name", FAST)
@pytest.mark.share(12)
@pytest.mark.turns(2)
def test_nothing_falls_back_where_nothing_has_to(name, pair_of):
    """In every fourth of the modes that the product of families and modes leaves out."""
    ours, _ = pair_of(name)
    before = accel.report(ours).fallbacks
    for mode in MODES:
        turn = NAMES.index(name) + ALL_FAST.index(mode.name) if mode.name in ALL_FAST else None
        wanted = turn is not None and (name, mode) not in PRODUCT and BY_NAME[name].takes(mode.name)
        if wanted and (EVERYTHING or turn % 4 == 0):
            mode(ours, *padded(mode.lengths))
            assert accel.report(ours).fallbacks == before, mode


@pytest.mark.parametrize("name", [name for name in NAMES if BY_NAME[name].core or (name,) in every(5, NAMES)])
@pytest.mark.share(10)
@pytest.mark.turns(2)
def test_restore_is_exact(name, tiny):
    model = make(name)
    twin = copy.deepcopy(model)
    ids, mask = padded()
    before = tiny.snapshot(model)
    accel.optimize(model)
    accel.restore(model)
    tiny.assert_same_state(before, tiny.snapshot(model))
    accel.optimize(model)
    generate(model, ids, mask)
    generate(twin, ids, mask)
    accel.restore(model)
    assert tiny.differences(model, twin) == []
    assert model.state_dict().keys() == twin.state_dict().keys()
    assert torch.equal(model(ids, attention_mask=mask).logits, twin(ids, attention_mask=mask).logits)
    assert accel.report(model).sites == []


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2", "bloom", "mixtral"])
@pytest.mark.share(6)
def test_a_random_walk(name, seed, pair_of):
    ours, stock = pair_of(name)
    assert ("", "language model", "patched") in {site[:3] for site in accel.report(ours).sites}
    walk(ours, stock, seed)


PROMPTS = ["Emma was", "It is a truth universally acknowledged, that a man who can dance", '"Oh! my dear Jane,']

SHIPPED_MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8, "repetition_penalty": 1.1},
    "beams": {"num_beams": 4, "num_return_sequences": 2, "no_repeat_ngram_size": 3},
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def stock():
    return AutoModelForCausalLM.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def fast(stock):
    return accel.optimize(copy.deepcopy(stock))


def write(model, inputs, **mode) -> list[list[int]]:
    torch.manual_seed(0)
    return model.generate(**inputs, **{"max_new_tokens": 32, "do_sample": False} | mode).tolist()


def test_text_to_calibrate_on_is_none_of_the_held_out():
    paragraphs = {line for line in CALIBRATION.read_text().splitlines() if line}
    assert len(paragraphs) > 50 and not paragraphs & set(HELD_OUT.read_text().splitlines())


@pytest.mark.parametrize("mode", SHIPPED_MODES)
def test_optimized_it_writes_the_tokens_of_stock_in_a_padded_batch(stock, fast, tokenizer, mode):
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    assert inputs.attention_mask[0, 0] == 0
    assert write(fast, inputs, **SHIPPED_MODES[mode]) == write(stock, inputs, **SHIPPED_MODES[mode])
