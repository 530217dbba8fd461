"""What cannot be quantized is said, and left as it is."""

import math

import pytest
from torch import nn

import accel
from accel.planning.plan import PLAN
from support.llm.families import make, padded
from support.llm.outputs import generate, same
from support.llm.quantized import held_by, logits, rounded, sites


def test_wrong_names_are_refused_and_the_valid_ones_named():
    model = make("llama")
    with pytest.raises(ValueError, match="weights='int5' is not one of None, 'int8', .*'int4-g64', .*'fp8'"):
        accel.optimize(model, weights="int5")
    with pytest.raises(ValueError, match="keep_original=None"):
        accel.optimize(model, weights="int8", keep_original=None)
    assert not held_by(model) and PLAN not in vars(model)


@pytest.mark.parametrize(
    ("name", "weights", "path", "value"),
    [
        ("qwen2", "int8", "model.layers.1.mlp.up_proj.weight", math.nan),
        ("llama", "int8-head", "lm_head.weight", math.nan),
        ("mixtral", "int4-g32", "model.layers.1.mlp.experts.down_proj", math.inf),
    ],
)
@pytest.mark.share(1)
def test_a_weight_that_is_no_number_is_named_and_nothing_changes(name, weights, path, value, tiny):
    model = make(name)
    model.get_parameter(path).data.flatten()[7] = value
    before = tiny.snapshot(model)
    calls = [lambda strict=strict: accel.optimize(model, weights=weights, strict=strict) for strict in (False, True)]
    for call in calls if name == "mixtral" else [*calls, lambda: accel.quantize(model, weights)]:  # leaves experts
        with pytest.raises(ValueError, match=f"{path.removesuffix('.weight')}: NaN or Inf"):
            call()
        assert not held_by(model)
        assert {key: value[0] for key, value in before.items()} == {k: v[0] for k, v in tiny.snapshot(model).items()}


def test_what_does_not_fit_is_left_with_a_reason_or_refused(tiny):
    model, stock = make("llama", intermediate_size=100), make("llama", intermediate_size=100)
    before = tiny.snapshot(model)
    with pytest.raises(ValueError, match=r"strict=True: model.layers.0.mlp.down_proj \(weights\): 100 inputs"):
        accel.optimize(model, weights="int8", strict=True)
    tiny.assert_same_state(before, tiny.snapshot(model))
    accel.optimize(model, weights="int8")
    assert sites(model)["model.layers.0.mlp.down_proj"] == ("skipped", "100 inputs, not a multiple of 8")
    assert type(model.model.layers[0].mlp.down_proj) is nn.Linear
    assert sites(model)["model.layers.1.mlp.up_proj"] == ("patched", "int8 by row")
    ids, mask = padded()
    same(generate(model, ids, mask), generate(rounded(stock, model), ids, mask))
    with pytest.warns(UserWarning, match="nothing to quantize as 'int4'"):
        accel.optimize(model, weights="int4")  # by 128 columns, which none of them has
    assert not held_by(model) and not accel.report(model).weights
    same(generate(model, ids, mask), generate(stock, ids, mask))
    accel.restore(model)
    tiny.assert_same_state(before, tiny.snapshot(model))


ODD = {"hidden_size": 36, "num_attention_heads": 2, "head_dim": 18, "intermediate_size": 50}  # 36 and 50 inputs
UNFIT = {
    "int4": ({}, "64 inputs, not a multiple of 128"),
    "int4-g64": (ODD, "36 inputs, not a multiple of 64"),
    "int8": (ODD, "36 inputs, not a multiple of 8"),
}


@pytest.mark.parametrize("weights", UNFIT)
def test_a_scheme_that_fits_no_linear_is_told(weights, tiny):
    sizes, reason = UNFIT[weights]
    model, stock = make("llama", **sizes), make("llama", **sizes)
    before = tiny.snapshot(model)
    with pytest.raises(ValueError, match=f"strict=True: model.layers.0.self_attn.q_proj .weights.: {reason}"):
        accel.optimize(model, weights=weights, strict=True)
    tiny.assert_same_state(before, tiny.snapshot(model))
    told = f"nothing to quantize as '{weights}': model.layers.0.self_attn.q_proj: {reason}"
    with pytest.warns(UserWarning) as warned:
        accel.optimize(model, weights=weights)
    (mine,) = (one for one in warned if "accel" in str(one.message))
    assert str(mine.message) == f"accel.optimize: {told}" and mine.filename == __file__
    rows = sites(model)
    assert rows.pop("") == ("skipped", told) and len(rows) == 14 and {row[0] for row in rows.values()} == {"skipped"}
    assert told in " ".join(str(accel.report(model)).replace("│", " ").split())
    with pytest.raises(ValueError, match=told):
        accel.quantize(make("llama", **sizes), weights)
    same(logits(model), logits(stock))
    accel.restore(model)
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_weights_that_are_of_the_scheme_already_are_no_reason_to_warn(recwarn):
    model = accel.quantize(make("llama"), "int8")
    accel.optimize(model, weights="int8", activations="int8")
    assert not [one for one in recwarn if "accel" in str(one.message)] and len(held_by(model)) == 14
    assert {status for status, _ in sites(model).values()} == {"skipped"} and "" not in sites(model)
