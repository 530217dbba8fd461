"""The model called directly, as generate does and as users do: every logit, in every way of giving cache and mask."""

import pytest
import torch

from support.llm.calls import new_cache
from support.llm.families import FAMILIES, every, padded, prompt
from support.llm.outputs import both, flat, same, shown

CORE = [family.name for family in FAMILIES if family.core]
FAST = [family.name for family in FAMILIES if family.expected == "fast"]


def masks(rows: int = 2, length: int = 9) -> dict[str, torch.Tensor | None]:
    """2-D masks by their name; ones, zeros where nothing is attended to."""
    ones = torch.ones(rows, length, dtype=torch.long)
    found = {"none": None, "ones": ones}
    for name, hidden in {
        "left": [(0, slice(0, 4))],
        "all-rows-left": [(0, slice(0, 2)), (1, slice(0, 5))],
        "right": [(1, slice(6, 9))],
        "middle": [(0, slice(3, 5)), (1, slice(7, 8))],
        "scattered": [(0, slice(1, 9, 2)), (1, slice(2, 3))],
        "both-ends": [(0, slice(0, 2)), (0, slice(7, 9))],
    }.items():
        found[name] = ones.clone()
        for row, columns in hidden:
            found[name][row, columns] = 0
    found["bool"] = found["left"].bool()
    found["float"] = found["left"].float()
    return found


@pytest.mark.parametrize(("name",), every(3, FAST))
def test_every_logit(name, pair_of):
    ids = prompt(2, 9)
    both(pair_of(name), lambda model: {"logits": model(ids).logits})


@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize("name", CORE)
@pytest.mark.share(3)
def test_masks_of_one_call_and_of_the_next(name, mask, pair_of):
    """The mask grows by ones, as generate's does."""
    ids, mask = prompt(2, 9), masks()[mask]

    def call(model):
        cache, found = new_cache(model), {}
        output = model(ids, attention_mask=mask, past_key_values=cache)
        found["first"], grown = shown(output.logits, mask), mask
        for step in range(3):
            if mask is not None:
                grown = torch.cat([grown, grown.new_ones(2, 1)], 1)
            output = model(prompt(2, 1, 5 + step), attention_mask=grown, past_key_values=cache)
            found[f"{step}"] = output.logits
        return found

    both(pair_of(name), call)


@pytest.mark.parametrize("name", CORE)
def test_a_mask_that_changes_between_two_steps(name, pair_of):
    """What was seen is hidden, then seen again. (What was hidden when it was read is anybody's guess.)"""
    ids, mask = padded((9, 5))

    def call(model):
        cache = new_cache(model)
        model(ids, attention_mask=mask, past_key_values=cache)
        found, grown = {}, mask
        for step, (row, column, value) in enumerate([(0, 2, 0), (1, 6, 0), (0, 2, 1), (0, 9, 0)]):
            grown = torch.cat([grown, grown.new_ones(2, 1)], 1)
            grown[row, column] = value
            found[f"{step}"] = model(prompt(2, 1, step), attention_mask=grown, past_key_values=cache).logits
        return found

    both(pair_of(name), call)


@pytest.mark.parametrize("refill", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_loop_of_the_users(name, refill, pair_of):
    """With the cache that came back, and with one id tensor that is written anew in every step."""
    ids = prompt(2, 7)

    def call(model):
        output = model(ids, use_cache=True)
        logits, step = [output.logits], ids[:, -1:].clone()
        for _ in range(6):
            best = output.logits[:, -1:].argmax(-1)
            step = step.copy_(best) if refill else best
            output = model(step, past_key_values=output.past_key_values)
            logits.append(output.logits)
        return {str(i): x for i, x in enumerate(logits)} | flat(output.past_key_values, "cache")

    both(pair_of(name), call)


@pytest.mark.parametrize("name", CORE)
def test_several_words_a_step(name, pair_of):
    """A text in pieces, with a mask and without: what one call gives."""
    ids, mask = padded((12, 7), seed=3)
    whole = {mask_given: pair_of(name)[1](ids, attention_mask=mask if mask_given else None).logits
             for mask_given in (False, True)}  # fmt: skip

    for given in (False, True):

        def call(model, given=given):
            cache, pieces = new_cache(model), []
            for start, stop in ((0, 5), (5, 6), (6, 9), (9, 12)):
                seen = {"attention_mask": mask[:, :stop]} if given else {}
                where = (mask.cumsum(1) - 1).clamp_min(0)[:, start:stop] if given else None
                pieces.append(model(ids[:, start:stop], past_key_values=cache, **seen, position_ids=where).logits)
            return {"logits": shown(torch.cat(pieces, 1), mask if given else None)}

        both(pair_of(name), call)
        if not given:
            same(call(pair_of(name)[0]), {"logits": whole[False]})


@pytest.mark.parametrize("name", CORE)
def test_the_decoder_alone(name, pair_of):
    """Called without its head, as embedding models and value heads do."""
    ids, mask = padded()

    def call(model):
        base = model.get_submodule(model.base_model_prefix)
        output = base(ids, attention_mask=mask)
        more = base(prompt(2, 1), attention_mask=torch.cat([mask, mask.new_ones(2, 1)], 1),
                    past_key_values=output.past_key_values)  # fmt: skip
        return {"states": shown(output.last_hidden_state, mask), "more": more.last_hidden_state}

    both(pair_of(name), call)
