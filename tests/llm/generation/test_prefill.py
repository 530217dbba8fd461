"""Short prompts filled up to the lengths of graphs, against an unpatched deep copy; run eagerly, as captured."""

import pytest
import torch
from accel_kernels.attention.paged.kv import LENGTH

import accel
from accel.libraries.cache import cache_argument
from accel.llm.generation import prefill as short
from accel.llm.generation.prefill import MOST_PROMPT, bucket_for
from support.llm.calls import new_cache
from support.llm.families import FAMILIES, every, make, padded, prompt
from support.llm.filled_prefill import filled, new_pair, shapes, talk
from support.llm.miniatures.mambas import MAMBAS
from support.llm.modes import MODES
from support.llm.outputs import generate, same

FAST = [family.name for family in FAMILIES if family.expected == "fast"]
# Rotated, with a table of positions, with a window, with a softcap, with biases by distance, side by side, rotated by a
# table of its own, with positions counted from 2, with normed heads.
SOME = ("llama", "gpt2", "mistral", "gemma2", "falcon-alibi", "phi", "gptj", "opt", "qwen3")
LENGTHS = (1, 2, 15, 16, 17, 32, 33, 63, 64, 65, 100)
MODE = {mode.name: mode for mode in MODES}


@pytest.fixture(scope="module")
def pair_of():
    made = {}

    def pair(name):
        if name not in made:
            made[name] = new_pair(name)
        shapes(made[name][0]).clear()
        return made[name]

    return pair


# -- the same as stock -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [*((one,) for one in LENGTHS), (9, 5), (16, 1, 7), (31, 33), (20, 20)], ids=str)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.share(12)
@pytest.mark.turns(2)
def test_logits_and_the_steps_after(name, lengths, pair_of):
    """Of one row without a mask; of several padded on the left."""
    ours, stock = pair_of(name)
    given = padded(lengths) if len(lengths) > 1 else padded(lengths)[:1]
    same(talk(ours, *given), talk(stock, *given))
    variant = ("prompt",) if len(set(lengths)) == 1 else ("prompt", "mask")
    assert shapes(ours) == [((len(lengths), bucket_for(len(lengths), max(lengths))), variant)]


@pytest.mark.parametrize(("name", "mode"), [*every(2, FAST, ["greedy-padded"]), *every(4, FAST, ["greedy"])], ids=str)
@pytest.mark.share(18)
@pytest.mark.turns(2)
def test_every_family(name, mode, pair_of):
    """That the filling is taken, or that the family stays out, is what its way of being called says."""
    ours, stock = pair_of(name)
    inputs = padded(MODE[mode].lengths)
    same(MODE[mode](ours, *inputs), MODE[mode](stock, *inputs))
    assert len(shapes(ours)) == vars(ours)["forward"].convention.pads_prompts


CALLS = (
    "greedy-long", "one-word", "no-prompt", "sample", "sample-top", "sample-several", "beam", "beam-sample", "assisted",
    "prompt-lookup", "continued", "cropped", "given-cache", "prefilled", "fanned-out", "chunked-prefill", "embeddings",
    "streamer", "inference-mode", "positions", "padded-right", "guided",
)  # fmt: skip


@pytest.mark.parametrize("mode", [MODE[name] for name in CALLS], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
@pytest.mark.share(6)
@pytest.mark.turns(2)
def test_ways_of_generating(name, mode, pair_of):
    ours, stock = pair_of(name)
    inputs = padded(mode.lengths)
    try:
        theirs = mode(stock, *inputs)
    except (ValueError, TypeError, AttributeError, RuntimeError, IndexError):
        pytest.skip("stock cannot do this itself")
    same(mode(ours, *inputs), theirs)


# -- what is filled up stays without effect ----------------------------------------------------------------------------


def with_filling(monkeypatch, model, change, ids, mask) -> tuple[dict, list[torch.Tensor]]:
    """What comes out, and the cache, where change(tokens behind the prompt) is what it is filled up with."""
    whole = short.pad_to_bucket

    def other(tokens, positions, room):
        new = tokens.shape[1]
        tokens, positions, last = whole(tokens, positions, room)
        assert tokens.shape[1] > new
        change(tokens[:, new:])
        return tokens, positions, last

    cache = new_cache(model)
    monkeypatch.setattr(short, "pad_to_bucket", other)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    embeds = model.get_input_embeddings()(ids)
    output = model(
        inputs_embeds=embeds, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
    )
    monkeypatch.setattr(short, "pad_to_bucket", whole)
    found = {"logits": output.logits}
    grown = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    at = grown.sum(1, keepdim=True) - 1
    word = prompt(len(ids), 1, 3)
    found["next"] = model(word, attention_mask=grown, position_ids=at, past_key_values=cache).logits
    found["length"] = torch.tensor([layer.get_seq_length() for layer in cache.layers])
    return found, [t.clone() for layer in cache.layers for t in (layer.keys, layer.values)]


@pytest.mark.parametrize("value", [0.0, 50.0, float("inf"), float("nan")])
@pytest.mark.parametrize("lengths", [(10,), (10, 6), (41,)], ids=str)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.share(5)
def test_bit_for_bit_whatever_it_is_filled_up_with(name, lengths, value, pair_of, monkeypatch):
    ours, _ = pair_of(name)
    ids, mask = padded(lengths)
    wanted, kept = with_filling(monkeypatch, ours, lambda t: None, ids, mask)
    found, held = with_filling(monkeypatch, ours, lambda t: t.fill_(value), ids, mask)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert all(map(torch.equal, held, kept)) and all(t.isfinite().all() for t in held)
    assert set(found["length"].tolist()) == {max(lengths) + 1}


@pytest.mark.parametrize("family", MAMBAS, ids=str)
def test_states_of_a_model_that_takes_no_positions(family, monkeypatch):
    """Its texts are stock's, and no bit of what it says and keeps hangs on what a prompt is filled up with."""
    stock = make(family)
    ours = filled(accel.optimize(make(family)))
    for lengths in ((9,), (16,), (9, 5), (31, 33)):
        same(generate(ours, *padded(lengths)), generate(stock, *padded(lengths)))
    assert shapes(ours) == [
        ((len(lengths), bucket_for(len(lengths), max(lengths))), ("prompt", "mask") if masked else ("prompt",))
        for lengths, masked in (((9,), False), ((16,), False), ((9, 5), True), ((31, 33), True))
    ]
    whole, found, name = short.pad_to_bucket, [], cache_argument(type(ours).forward)
    for value in (0.0, float("nan")):

        def other(tokens, positions, bucket, value=value):
            filled_up, places, last = whole(tokens, positions, bucket)
            filled_up[:, tokens.shape[1] :] = value
            return filled_up, places, last

        monkeypatch.setattr(short, "pad_to_bucket", other)
        ids, mask = padded((9, 5))
        cache, embeds = new_cache(ours), ours.get_input_embeddings()(ids).detach()
        given = {"attention_mask": mask, name: cache, "logits_to_keep": 1, "use_cache": True}
        logits = ours(inputs_embeds=embeds, **given).logits
        kept = [state for layer in cache.layers for state in (layer.conv_states[0], layer.recurrent_states[0])]
        found.append([logits, *(state.clone() for state in kept)])
    assert all(map(torch.equal, *found)) and all(one.isfinite().all() for one in found[0])


def test_two_lengths_of_one_room_in_turn(pair_of):
    """The shorter prompt after the longer, in one cache that is emptied between."""
    ours, stock = pair_of("llama")

    def call(model):
        cache, found = new_cache(model), {}
        for length in (60, 35, 50):
            cache.crop(-cache.get_seq_length())
            found[f"{length}"] = model(prompt(1, length), past_key_values=cache, logits_to_keep=1).logits
            found[f"{length}, then"] = model(prompt(1, 1, 7), past_key_values=cache).logits
        return found

    same(call(ours), call(stock))
    assert shapes(ours) == 3 * [((1, 64), ("prompt",))]


def test_the_kernels_are_told_the_real_length(pair_of):
    ours, _ = pair_of("llama")
    cache = new_cache(ours)
    ours(prompt(1, 10), past_key_values=cache, logits_to_keep=1)
    store = cache.layers[0].store
    assert store.length == 10 and int(store.metadata[LENGTH]) == 10


# -- what is not filled up ---------------------------------------------------------------------------------------------


def test_other_calls_are_as_they_were(pair_of):
    ours, _stock = pair_of("llama")
    cache = new_cache(ours)
    ours(prompt(1, 10))  # all logits
    ours(prompt(1, 10), logits_to_keep=3)
    ours(prompt(1, 10), past_key_values=cache)
    ours(prompt(1, 70), past_key_values=cache, logits_to_keep=1)  # not the beginning
    ours(prompt(1, MOST_PROMPT + 1), logits_to_keep=1)
    assert shapes(ours) == []
