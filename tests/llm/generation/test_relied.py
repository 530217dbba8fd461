"""What stock code reads in a call and fused layers do not: once it is changed stock runs, and is fast again once it is
changed back.
"""

import copy
import pickle

import pytest

import accel
from accel.patching.code import OWN
from accel.quantization.module import QuantizedLinear
from support.llm.edits.code import CHANGES, attention, halved, put
from support.llm.families import make, padded
from support.llm.outputs import generate, same


def reasons(model) -> dict[str, int]:
    """Why calls of the whole model ran stock; norms and the head tell for themselves."""
    return {reason: calls for path, reason, calls in accel.report(model).fallbacks if not path}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_and_undone(name, pair):
    family, change, shows, words = CHANGES[name]
    ours, stock = pair(family)
    ids, mask = padded()

    def written(model):
        call = {"max_new_tokens": 4, "output_logits": True, "return_dict_in_generate": True}
        return generate(model, ids, mask, **call)

    plain = written(stock)
    same(written(ours), plain)
    assert not reasons(ours)
    with change(ours, stock):
        theirs = written(stock)
        same(written(ours), theirs)
        told = reasons(ours)
    assert len(told) == 1 and words in next(iter(told)), told
    if shows:
        assert float((theirs["logits.0"] - plain["logits.0"]).abs().max()) > 1e-3
    same(written(ours), plain)
    assert reasons(ours) == told, "it is fast again"


def test_what_is_replaced_before_the_first_call_is_seen(pair):
    ours, stock = pair("llama")
    kind, ids = type(attention(stock)), padded()[0]
    with put(kind, "forward", halved(kind.forward)):
        same(generate(ours, ids, None), generate(stock, ids, None))
    assert {reason for _, reason, _ in accel.report(ours).fallbacks} == {
        f"{kind.__name__}.forward was changed after accel.optimize"
    }


def test_a_copy_made_while_something_was_changed_knows_it(pair):
    ours, stock = pair("mistral")
    ids, mask = padded()
    ours.config.sliding_window = stock.config.sliding_window = 3
    copied = copy.deepcopy(ours)
    same(generate(copied, ids, mask), generate(stock, ids, mask))
    assert "sliding_window" in next(iter(reasons(copied)))


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.parametrize("how", COPIES)
def test_what_is_replaced_between_copying_and_the_first_call_is_seen(how, pair):
    """A copy looks the code up when it is made. Its first call would take what it finds for what was matched."""
    ours, stock = pair("llama")
    kind, ids, copied = type(attention(stock)), padded()[0], COPIES[how](ours)
    with put(kind, "forward", halved(kind.forward)):
        same(generate(copied, ids, None), generate(stock, ids, None))
    assert list(reasons(copied)) == [f"{kind.__name__}.forward was changed after accel.optimize"]
    told = reasons(copied)
    same(generate(copied, ids, None), generate(stock, ids, None))
    assert reasons(copied) == told, "it is fast again"


def test_accels_own_classes_are_not_among_the_code_that_is_looked_at():
    """They stand in for stock's, so what they run is not stock's code, and nothing there takes anything for granted."""
    ours = accel.optimize(make("llama"), weights="int8")
    assert any(type(module) is QuantizedLinear for module in ours.modules())
    code = vars(ours)["forward"].relied_model.code
    places = {str(t.mapping.get("__module__") or t.mapping.get("__name__")).partition(".")[0] for t in code.tables}
    assert {"torch", "transformers"} <= places
    assert OWN == "accel" and OWN not in places
    assert not any(kind.__module__.startswith(OWN) for kind in code.kinds)


def test_fields_that_no_layer_reads_cost_nothing(pair):
    ours, stock = pair("gpt2")
    ids, mask = padded()
    for model in (ours, stock):
        model.config.pad_token_id, model.config.problem_type, model.config.name_or_path = 5, "regression", "y"
    same(generate(ours, ids, mask), generate(stock, ids, mask))
    assert not reasons(ours)


def test_optimized_again_it_is_fast_with_what_was_changed():
    ours = accel.optimize(make("mistral"))
    stock = make("mistral")
    ids, mask = padded()
    ours.config.sliding_window = stock.config.sliding_window = 3
    generate(ours, ids, mask)
    assert reasons(ours)
    accel.optimize(ours)
    same(generate(ours, ids, mask), generate(stock, ids, mask))
    assert not reasons(ours)


def test_what_generate_changes_by_itself_leaves_graphs_and_layers_as_they_are(pair):
    """On a GPU it takes other experts for steps than for prompts, of equal results. The user's are another matter."""
    from transformers.integrations.moe import ExpertsInterface

    ours, stock = pair("mixtral")
    ids, mask = padded()
    same(generate(ours, ids, mask), generate(stock, ids, mask))
    seen = vars(ours)["forward"].seen
    for name in ("batched_mm", "grouped_mm", "eager"):
        ours.set_experts_implementation(name)
        ours.generation_config.temperature = 0.5 + len(name)
        assert seen.holds()
    with put(ExpertsInterface._global_mapping, "mine", halved(ExpertsInterface._global_mapping["batched_mm"])):
        for model in (ours, stock):
            model.set_experts_implementation("mine")
        assert not seen.holds()
        same(generate(ours, ids, mask), generate(stock, ids, mask))
        assert "implementation of experts" in next(iter(reasons(ours)))
        for model in (ours, stock):
            model.set_experts_implementation("grouped_mm")
    counted = reasons(ours)
    same(generate(ours, ids, mask), generate(stock, ids, mask))
    assert reasons(ours) == counted
