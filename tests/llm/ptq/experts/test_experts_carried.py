"""Quantized experts copied, pickled, cast, saved and loaded."""

import copy
import json
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM

import accel
from accel.llm.runtime.experts import ExpertsForward
from accel.quantization.experts import QuantizedExperts
from support.llm.families import prompt
from support.llm.outputs import same
from support.llm.quantized import STACKS, mixture, of_experts, quantized_pair, rounded, sites


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("weights", ["int4-g32-asym", "fp8"])
@pytest.mark.share(2)
def test_copies(copied, weights):
    ours, twin = quantized_pair("gpt-oss", weights)
    other = copied(ours)
    same({"x": other(prompt()).logits}, {"x": twin(prompt()).logits})
    assert not accel.report(other).fallbacks
    accel.restore(other)
    assert torch.equal(other(prompt()).logits, mixture("gpt-oss")(prompt()).logits)
    assert type(next(iter(of_experts(ours).values()))) is QuantizedExperts


def test_numbers_are_never_cast():
    model = accel.optimize(mixture("gpt-oss"), weights="int8")
    experts = next(iter(of_experts(model).values()))
    before = {name: tensor.clone() for name, tensor in experts.named_buffers()}
    del before["like"]
    model.to(torch.bfloat16)
    assert experts.dtype == torch.bfloat16 == experts.down_proj_bias.dtype
    assert all(torch.equal(experts.get_buffer(name), tensor) for name, tensor in before.items())
    with torch.no_grad():
        assert model(prompt()).logits.dtype == torch.bfloat16
    assert not accel.report(model).fallbacks  # and they are fast
    accel.restore(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    wanted = mixture("gpt-oss").to(torch.bfloat16)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), wanted.parameters(), strict=True))


def test_small_scales_are_kept_in_float32():
    model = mixture("mixtral", torch.float16)
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        experts.down_proj[1].mul_(1e-4)
    ours = accel.optimize(copy.deepcopy(model), weights="int8")
    found = next(iter(of_experts(ours).values()))
    assert found.stack("down_proj").scales.dtype == torch.float32
    assert found.stack("gate_up_proj").scales.dtype == torch.float16
    assert isinstance(vars(found)["forward"], ExpertsForward) and found.dtype == torch.float16


@pytest.mark.parametrize(("name", "weights"), [("mixtral", "int8"), ("gpt-oss", "int4-g32")])
def test_saved_as_what_the_numbers_stand_for(name, weights, tmp_path):
    before = mixture(name, torch.bfloat16)
    ours = accel.optimize(copy.deepcopy(before), weights=weights)
    with pytest.warns(UserWarning, match=r"4 stacks of experts, model.layers.0.mlp.experts.gate_up_proj the first"):
        ours.save_pretrained(tmp_path)
    wanted = dict(rounded(before, ours).named_parameters())
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert r"re:.*\.experts(\.|$)" in config["ignore"]
    for load in (AutoModelForCausalLM.from_pretrained, accel.load):
        if load is not accel.load:
            pytest.importorskip("compressed_tensors")
        loaded = load(tmp_path, dtype=torch.bfloat16)
        assert len(of_experts(loaded)) == 2
        for path, module in of_experts(loaded).items():
            assert all(torch.equal(getattr(module, stack), wanted[f"{path}.{stack}"]) for stack in STACKS)
    accel.optimize(loaded, weights=weights)  # the linears are so already
    assert {type(one) for one in of_experts(loaded).values()} == {QuantizedExperts}
    assert {row["path"].rpartition(".")[2] for row in accel.report(loaded).weights} == {*STACKS}
    assert sites(loaded)["model.layers.0.self_attn.q_proj"][0] == "skipped"
