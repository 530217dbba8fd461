"""Quantized models that are changed, and what cannot be quantized."""

import math

import pytest
import torch
from torch import nn

import accel
from accel.llm.recording import resting
from accel.planning.plan import PLAN
from accel.quantization.experts import holds_numbers
from support.llm.changes import CHANGES
from support.llm.edits.places import lora
from support.llm.families import every, make, padded
from support.llm.optimized_models import optimized, pair
from support.llm.outputs import generate, ran_fast, same, write_alike
from support.llm.prequantized.models import prequantized
from support.llm.quantized import held_by, logits, rounded, sites

LATER = ("lora", "two-loras", "lora-with-dropout-and-bias", "peft-model-taken-off", "norm-in-place", "head-in-place",
         "words-in-place", "around-a-matrix", "around-the-attention", "around-the-mlp", "hook-on-a-matrix",
         "hook-before-a-matrix", "hook-on-the-mlp", "own-forward-of-a-matrix", "own-forward-of-mlp", "another-layer",
         "fewer-layers", "other-activation", "trained", "checkpointing", "frozen", "hidden-states-always")  # fmt: skip
WRITES = ("lora-merged", "peft-model", "matrix-in-place", "through-data", "new-data", "pruned")


HEAD = ("hook-on-the-head", "other-head", "more-words")  # what is done to a head in 8 bits
TABLE = [
    (name, change, "int8")
    for name, change in every(6, ["llama", "gpt2"], [c for c in CHANGES if c.name in LATER])
    if not change.only or name in change.only
]
TABLE += [
    *((*row, "int8-head") for row in every(2, ["llama", "llama-tied"], [c for c in CHANGES if c.name in HEAD])),
]


@pytest.mark.parametrize(("name", "change", "weights"), TABLE, ids=str)
@pytest.mark.share(2)
@pytest.mark.turns(2)
def test_a_change_is_seen_by_the_next_call(name, change, weights):
    ours, stock = pair(name, weights=weights)
    theirs = rounded(stock, ours)
    for model in (ours, theirs):
        model.family = name
    for step in (*change.steps, *filter(None, [change.reverse])):
        ours, theirs = (step(model) or model for model in (ours, theirs))
        write_alike(ours, theirs)
        same(logits(ours), logits(theirs))


@pytest.mark.parametrize("name", ["self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj"])
@pytest.mark.share(2)
def test_a_plain_linear_put_among_quantized_ones(name):
    ours, stock = pair("llama", weights="int4-g32")
    theirs = rounded(stock, ours)
    ids, mask = padded()
    generate(ours, ids, mask)
    for model in (ours, theirs):
        parent, _, last = name.rpartition(".")
        parent = model.model.layers[0].get_submodule(parent)
        old = getattr(parent, last)
        torch.manual_seed(3)
        setattr(parent, last, nn.Linear(old.in_features, old.out_features, bias=False))
    same(generate(ours, ids, mask), generate(theirs, ids, mask))
    ran_fast(ours)


def test_looking_at_a_model_copies_no_quantized_weight(monkeypatch):
    model = make("llama")
    accel.optimize(model, weights="int8", keep_original=False)
    held = {id(tensor) for module in held_by(model) for tensor in module.buffers()}
    copied, make_copy = [], resting._copied

    def noted(tensor, module):
        found = make_copy(tensor, module)
        copied.extend(id(tensor) for copy in found[1:] if copy is not None)
        return found

    monkeypatch.setattr(resting, "_copied", noted)
    accel.optimize(model)
    assert copied and held.isdisjoint(copied)


@pytest.mark.parametrize("change", [c for c in CHANGES if c.name in WRITES], ids=str)
def test_writing_into_a_weight_is_an_error(change):
    ours = optimized("llama", weights="int8")
    ids, mask = padded()
    before = generate(ours, ids, mask)
    with pytest.raises((RuntimeError, KeyError, TypeError)):
        for step in change.steps:
            ours = step(ours) or ours
    if change.name in ("matrix-in-place", "through-data", "new-data"):
        same(generate(ours, ids, mask), before)


@pytest.mark.parametrize("order", ["before", "after"])
def test_an_adapter_stays_through_restore(order):
    stock, ours = make("llama"), make("llama")
    add = lora("style", r=16)
    add(stock)
    if order == "before":
        add(ours)
    accel.optimize(ours, weights="int8")
    if order == "after":
        add(ours)
    assert len(held_by(ours)) == 14
    assert not any("lora_" in path for path, rule, _, _ in accel.report(ours).sites if rule == "weights")
    assert float((logits(ours)["logits"] - logits(stock)["logits"]).abs().max()) > 1e-4
    accel.restore(ours)
    assert not held_by(ours)
    assert torch.equal(logits(ours)["logits"], logits(stock)["logits"])


def test_an_adapter_put_around_ours_is_merged_into_8_bits_after_restore():
    bitsandbytes, peft = map(pytest.importorskip, ("bitsandbytes.nn", "peft.tuners.lora"))
    model, _ = prequantized("bitsandbytes")
    model.is_loaded_in_8bit = True
    accel.optimize(model)
    lora("style")(model)
    accel.restore(model)
    layer = model.model.layers[0].self_attn.q_proj
    assert type(layer) is peft.Linear8bitLt and type(layer.base_layer) is bitsandbytes.Linear8bitLt
    before = layer.base_layer.weight.clone()
    with pytest.warns(UserWarning, match="rounding errors"):
        layer.merge()
    assert not torch.equal(layer.base_layer.weight, before)


def test_gradients_reach_an_adapter_over_quantized_weights():
    ours, stock = pair("llama", weights="int8")
    theirs = rounded(stock, ours)
    ids, _mask = padded((9, 9))
    found = []
    for model in (ours, theirs):
        lora("style")(model)
        with torch.enable_grad():
            model(input_ids=ids, labels=ids).loss.backward()
        found.append({n.replace("base_layer.", ""): p.grad for n, p in model.named_parameters() if "lora_" in n})
    assert len(found[0]) == 28 and all(float(grad.abs().max()) > 0 for grad in found[0].values())
    same(*found)


@pytest.mark.parametrize(
    ("name", "weights", "dtype"),
    [(*row, torch.bfloat16) for row in (("llama-biases", "fp8"), ("gpt-oss", "int8"))]
    + [("llama-biases", "fp8", torch.float64)],
    ids=str,
)
@pytest.mark.share(1)
def test_another_dtype_afterwards(name, weights, dtype):
    model, stock = pair(name, weights=weights)
    held = [module for module in model.modules() if holds_numbers(module)]
    before = [{n: b.clone() for n, b in module.named_buffers(recurse=False) if b.numel()} for module in held]
    model.to(dtype)
    for module, copies in zip(held, before, strict=True):
        assert all(module.get_buffer(n).dtype == b.dtype and torch.equal(module.get_buffer(n), b)
                   for n, b in copies.items())  # fmt: skip
        assert {module.dtype, *(p.dtype for p in module.parameters())} == {dtype}
    ids, mask = padded()
    reference = rounded(stock, model).to(dtype)
    ours, theirs = (m(ids, attention_mask=mask).logits.double() for m in (model, reference))
    assert ours.isfinite().all() and float((ours - theirs)[mask.bool()].norm() / theirs[mask.bool()].norm()) < 0.05
    generate(model, ids, mask)
    assert not accel.report(model).fallbacks  # and they are fast
    accel.restore(model)
    assert all(p.dtype == dtype for p in model.parameters())
    assert torch.equal(model(ids, attention_mask=mask).logits, stock.to(dtype)(ids, attention_mask=mask).logits)


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


@pytest.mark.parametrize(
    ("weights", "sizes", "path", "reason"),
    [
        ("int8", {"intermediate_size": 100}, "model.layers.0.mlp.down_proj", "100 inputs, not a multiple of 8"),
        ("int8-head", {"hidden_size": 68, "head_dim": 16}, "lm_head", "68 inputs, not a multiple of 8"),
    ],
)
def test_what_does_not_fit_is_left_with_a_reason_or_refused(weights, sizes, path, reason, tiny):
    model, stock = make("llama", **sizes), make("llama", **sizes)
    before = tiny.snapshot(model)
    with pytest.raises(ValueError, match=rf"strict=True: .* \(weights\): {reason}"):
        accel.optimize(model, weights=weights, strict=True)
    tiny.assert_same_state(before, tiny.snapshot(model))
    accel.optimize(model, weights=weights)
    assert sites(model)[path] == ("skipped", reason) and type(model.get_submodule(path)) is nn.Linear
    assert ("patched", "int8 by row") in sites(model).values()
    ids, mask = padded()
    same(generate(model, ids, mask), generate(rounded(stock, model), ids, mask))
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
