"""Every module inside a fused layer of every family, changed in every way: what stock then computes is what comes."""

import copy

import pytest
import torch

import accel
from support.llm.families import BY_NAME, FAMILIES, available, layers, make, padded
from support.llm.outputs import same
from support.module_changes import CHANGES, answers, dropping

IDS, MASK = padded((4, 3))


def called(model) -> dict[str, torch.Tensor]:
    return {"logits": model(input_ids=IDS, attention_mask=MASK, use_cache=True).logits[:, -1]}


TABLE = [(family, change) for family in FAMILIES if family.expected != "stock" for change in CHANGES]


@pytest.mark.parametrize(("family", "change"), TABLE, ids=str)
@pytest.mark.share(40)
def test_a_changed_module_inside_a_layer_is_noticed(family, change):
    if not available(family.kind):
        pytest.skip(f"this transformers has no {family.kind}")
    go_through(family, change)


def test_a_mask_that_was_read_once_is_noticed():
    go_through(BY_NAME["gpt-neo"], "contents")


def go_through(family, change):
    stock = dropping(make(family))
    ours = accel.optimize(copy.deepcopy(stock))

    def fallbacks() -> int:
        return sum(calls for path, _, calls in accel.report(ours).fallbacks if not path)

    plain = called(stock)
    same(called(ours), plain)
    sites = accel.report(ours).sites
    fast = [path for path, rule, status, _ in sites if (rule, status) == ("decoder layer", "patched")]
    if not fast:
        assert family.expected == "either"
        return
    told = fallbacks()
    assert not told or family.expected == "either"
    path = next(path for path in layers(ours) if path in fast)
    modules = ((ours.get_submodule(one), stock.get_submodule(one)) for one in names_in(ours, path))
    for found, wanted in answers(modules, change, lambda: called(ours), lambda: called(stock)):
        same(found, wanted)
    told = fallbacks()
    same(called(ours), plain)
    assert fallbacks() == told, "it is fast again"


def names_in(model, path):
    return [f"{path}.{name}".rstrip(".") for name, _ in model.get_submodule(path).named_modules()]
