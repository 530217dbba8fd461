"""Arguments of a call in every form that stock takes, and those that it does not."""

import pytest
import torch

from support.llm.calls import new_cache
from support.llm.families import FAMILIES, VOCAB, padded, prompt
from support.llm.outputs import both, flat, same, second, shown

CORE = [family.name for family in FAMILIES if family.core]


@pytest.mark.parametrize("name", CORE)
def test_ways_of_asking(name, pair_of):
    ids = prompt(2, 9)
    words = {"inputs_embeds": pair_of(name)[1].get_input_embeddings()(ids)}
    for call in (
        {"logits_to_keep": 1},
        {"logits_to_keep": 3},
        {"logits_to_keep": torch.tensor([0, 4])},
        {"return_dict": False},
        {"use_cache": False},
        {"use_cache": False, "return_dict": False},
        {"output_hidden_states": True},
        {"position_ids": torch.arange(2, 11)[None].expand(2, -1)},
        {"position_ids": torch.arange(2, 11)[None]},
        {"labels": ids},
        {"labels": ids, "return_dict": False},
    ):
        both(pair_of(name), lambda model, call=call: flat(model(ids, **call)))
        both(pair_of(name), lambda model, call=call: flat(model(**words, **call)))


@pytest.mark.parametrize("name", CORE)
def test_forms_of_the_same_inputs(name, pair_of):
    """Positional, of other whole numbers, not contiguous, made under inference mode, past what is patched."""
    ids, mask = padded((9, 5))
    twice = ids.repeat_interleave(2, 1)
    with torch.inference_mode():
        made = ids.clone()
    for call in (
        lambda model: model(ids, *([] if second(model) == "attention_mask" else [None]), mask),
        lambda model: model.forward(ids, attention_mask=mask),
        lambda model: type(model).forward(model, ids, attention_mask=mask),
        lambda model: model(ids.int(), attention_mask=mask.int()),
        lambda model: model(twice[:, ::2], attention_mask=mask.repeat_interleave(2, 1)[:, ::2]),
        lambda model: model(made, attention_mask=mask.bool()),
        lambda model: model(ids[:1].expand(3, -1)),
    ):

        def logits(model, call=call):
            found = call(model).logits
            return {"logits": shown(found, mask if len(found) == len(mask) else None)}

        both(pair_of(name), logits)


@pytest.mark.parametrize("call", ["prompt", "step"])
@pytest.mark.parametrize("wrong", [VOCAB, -1, 10**6])
def test_ids_that_are_none_raise_what_stock_raises(wrong, call, pair_of):
    """And the model is as good as before."""

    def attempt(model):
        cache = new_cache(model)
        model(prompt(1, 5), past_key_values=cache)
        ids = prompt(1, 4 if call == "prompt" else 1).clone()
        ids[0, -1] = wrong
        with pytest.raises(IndexError) as error:
            model(ids, past_key_values=new_cache(model) if call == "prompt" else cache)
        return str(error.value), model(prompt(1, 1), past_key_values=cache).logits

    (mine, logits), (theirs, wanted) = map(attempt, pair_of("llama"))
    assert mine == theirs
    same({"after": logits}, {"after": wanted})


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"input_ids": prompt(), "inputs_embeds": torch.zeros(1, 9, 64)},
        {"input_ids": prompt(), "attention_mask": torch.ones(2, 9)},
        {"input_ids": prompt(), "attention_mask": torch.ones(1, 4)},
        {"input_ids": prompt(), "attention_mask": torch.ones(1, 12)},
        {"input_ids": prompt(), "attention_mask": torch.zeros(1, 9, dtype=torch.long)},
        {"input_ids": prompt(), "position_ids": torch.zeros(1, 5, dtype=torch.long)},
        {"input_ids": prompt()[0]},
        {"input_ids": prompt().float()},
        {"inputs_embeds": torch.zeros(1, 9, 32)},
        {"inputs_embeds": torch.zeros(1, 9, 64, dtype=torch.float64)},
        {"input_ids": prompt(1, 0)},
    ],
    ids=lambda call: "-".join(f"{k}{tuple(v.shape)}" for k, v in call.items()) or "nothing",
)
def test_what_stock_makes_of_odd_arguments(call, pair_of):
    """Mostly an error, and the same one."""

    def attempt(model):
        try:
            return flat(model(**call).logits)
        except Exception as error:
            return type(error), str(error)

    ours, stock = map(attempt, pair_of("llama"))
    if isinstance(stock, tuple):
        assert ours == stock
    else:
        same(ours, stock)
