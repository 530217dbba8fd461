"""What users do to a language model after optimize: the next call sees it, and computes what stock then computes."""

import pytest
import torch

from support.everything import EVERYTHING
from support.llm.changes import CHANGES
from support.llm.families import padded
from support.llm.outputs import generate, same

FAMILIES = ("llama", "gpt2", "gpt-neox")
# One of them in turn.
TABLE = [
    (name, change)
    for number, change in enumerate(CHANGES)
    for name in (change.only or (FAMILIES if EVERYTHING else FAMILIES[number % 3 :][:1]))
]


def calls(model, padded_batch: bool) -> dict[str, torch.Tensor]:
    """What generate gives, and every logit of a direct call."""
    ids, mask = padded((9, 5) if padded_batch else (7, 7))
    found = generate(model, ids, mask, max_new_tokens=5, output_logits=True, return_dict_in_generate=True)
    # What a hidden word computes is anybody's guess.
    return found | {"all": model(input_ids=ids, attention_mask=mask).logits[mask.bool()]}


@pytest.mark.parametrize(("name", "change"), TABLE, ids=str)
@pytest.mark.share(4)
def test_a_change_between_two_calls_is_seen_by_the_next(name, change, pair):
    ours, stock = pair(name)
    for model in (ours, stock):
        model.family = name
    plain = calls(stock, True)
    same(calls(ours, True), plain)
    for number, step in enumerate((*change.steps, *filter(None, [change.reverse]))):
        ours, stock = (step(model) or model for model in (ours, stock))
        theirs = calls(stock, True)
        for _ in range(2):
            mine = calls(ours, True)
            close(mine, theirs, change)
        if number == 0 and change.shows:
            assert float((theirs["all"] - plain["all"]).abs().max()) > 1e-2
        close(calls(ours, False), calls(stock, False), change)
    if change.reverse is not None and change.slack == 1:
        close(mine, plain, change)


def close(mine, theirs, change):
    if change.slack == 1:
        same(mine, theirs)
    else:  # tokens may part ways, and everything after them
        ours, stock = mine["all"].double(), theirs["all"].double()
        assert float((ours - stock).abs().max()) <= change.slack * 1e-5 * float(stock.abs().max())
