"""A cache that the user holds, between ours and stock, between two texts, and after restore."""

import copy

import pytest
import torch

import accel
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
