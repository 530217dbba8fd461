"""A cache that the user holds, between ours and stock, between two texts, and after restore."""

import copy

import pytest
import torch

import accel
from accel.libraries.cache import cache_of as cache_of_output
from accel.llm.kv_cache.cache import StoreLayer
from support.llm.calls import new_cache
from support.llm.families import FAMILIES, padded, prompt
from support.llm.outputs import both, flat, same

CORE = [family.name for family in FAMILIES if family.core]


@pytest.mark.parametrize("name", CORE)
def test_a_cache_of_stock_goes_on_with_ours_and_the_other_way(name, pair_of):
    ids, mask = padded((9, 6))
    ours, stock = pair_of(name)

    def run(first, second):
        cache = new_cache(stock)
        found = {"first": first(ids, attention_mask=mask, past_key_values=cache).logits[mask.bool()]}
        grown = mask
        for step in range(4):
            grown = torch.cat([grown, grown.new_ones(2, 1)], 1)
            model = second if step % 2 == 0 else first
            found |= flat(model(prompt(2, 1, step), attention_mask=grown, past_key_values=cache).logits, str(step))
        return found

    wanted = run(stock, stock)
    for pair in ((ours, ours), (ours, stock), (stock, ours)):
        same(run(*pair), wanted)


@pytest.mark.parametrize("name", CORE)
def test_a_cache_made_fast_is_good_after_restore(name, pair):
    ours, stock = pair(name)
    ids = prompt(2, 8)

    def talk(model, between=lambda model: model):
        cache, found = new_cache(model), {}
        for step, words in enumerate((ids[:, :6], ids[:, 6:7], ids[:, 7:8])):
            found[f"{step}"] = model(words, past_key_values=cache).logits
        between(model)
        for step in range(3):
            found[f"then {step}"] = model(prompt(2, 1, step), past_key_values=cache).logits
        copied = copy.deepcopy(cache)
        if getattr(model.config, "sliding_window", None) is None:  # stock's forget what a cut brings back
            cache.crop(-1)
        for kind, each in (("cropped", cache), ("copied", copied)):
            found[kind] = model(prompt(2, 1, 7), past_key_values=each).logits
        return found

    wanted = talk(stock)
    same(talk(ours, accel.restore), wanted)
    same(talk(ours, accel.optimize), wanted)


HELD = {
    "a forward's": lambda model: cache_of_output(model(prompt(1, 6))),
    "generate()'s": lambda model: generated(model, prompt(1, 9)),
    "beams'": lambda model: generated(model, prompt(1, 6), max_new_tokens=70, num_beams=2),
    "with rows to come": lambda model: waiting(cache_of_output(model(prompt(1, 7)))),
    "without its cache": lambda model: copy.deepcopy(cache_of_output(model(prompt(1, 5)))),
}


def generated(model, ids, **call):
    call = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True} | call
    return cache_of_output(model.generate(input_ids=ids, eos_token_id=None, pad_token_id=0, **call))


def waiting(cache):
    for layer in cache.layers:
        layer.batch_repeat_interleave(2)
        layer.batch_select_indices([0])
    cache.layers[0].batch_repeat_interleave(1)
    return cache


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("gradients", [False, True], ids=["", "gradients"])
def test_a_compiler_is_handed_the_librarys_cache(name, gradients, pair_of):
    """It traces the cache's code, which ours was not written for."""
    ours, stock = pair_of(name)
    compiled = torch.compile((ours if gradients else copy.deepcopy(stock)).forward, fullgraph=True, backend="eager")
    for how, made in HELD.items():
        held, wanted = made(ours), made(stock)
        assert isinstance(held.layers[0], StoreLayer), how
        for step in range(2):
            words = prompt(1, 1, step).expand(wanted.layers[0].keys.shape[0], 1)
            with torch.set_grad_enabled(gradients):
                found, theirs = (call(words, past_key_values=one) for call, one in ((compiled, held), (stock, wanted)))
            same(flat(found.logits), flat(theirs.logits))
        for layer, its in zip(held.layers, wanted.layers, strict=True):
            assert type(layer) is type(its) and vars(layer).keys() == vars(its).keys(), how
            same({"keys": layer.keys, "values": layer.values}, {"keys": its.keys, "values": its.values})
        if not gradients:
            same(flat(ours(words, past_key_values=held).logits), flat(stock(words, past_key_values=wanted).logits))
            assert isinstance(held.layers[0], StoreLayer), how
    torch.compiler.reset()


def test_two_caches_of_one_model_in_turn(pair_of):
    """Two conversations, a step of one and a step of the other; then one of them is dropped."""

    def call(model):
        caches, found = [new_cache(model), new_cache(model)], {}
        for number, cache in enumerate(caches):
            found[f"{number}"] = model(prompt(1 + number, 6 + number, number), past_key_values=cache).logits
        for step in range(8):
            if step == 5:
                caches[0] = new_cache(model)
            number = step % 2
            found[f"{number} {step}"] = model(prompt(1 + number, 1, step), past_key_values=caches[number]).logits
        return found

    both(pair_of("llama"), call)


def test_outputs_are_not_written_to_later(pair_of):
    ours, _ = pair_of("llama")
    kept, output = [], None
    for step in range(6):
        output = ours(
            prompt(1, 5 if step == 0 else 1, step), past_key_values=output.past_key_values if output else None
        )
        kept.append((output.logits, output.logits.clone()))
    assert all(torch.equal(*pair) for pair in kept)
