"""Experts that `weights=` leaves in their dtype, each with its reason in the report."""

import pytest
import torch

import accel
from accel.llm.ptq import experts as choice
from accel.quantization.experts import QuantizedExperts
from accel.quantization.scheme import Scheme
from support.llm.families import make
from support.llm.quantized import STACKS, mixture, of_experts, sites


def test_experts_of_another_formula_are_left(monkeypatch):
    model = mixture("gpt-oss")
    kind = type(model.model.layers[0].mlp.experts)
    monkeypatch.setattr(kind, "_apply_gate", lambda self, y: y[..., ::2].clamp(max=self.limit) * 3)
    accel.optimize(model, weights="int8")
    assert {type(one) for one in of_experts(model).values()} == {kind}
    status, reason = sites(model)["model.layers.0.mlp.experts"]
    assert status == "skipped" and ("library's own" in reason or "computes something else" in reason)
    assert sites(model)["model.layers.0.self_attn.q_proj"][0] == "patched"


def test_inputs_that_groups_do_not_divide_are_named():
    model = accel.optimize(make("qwen3-moe"), weights="int4-g32")  # 48 inner channels
    status, reason = sites(model)["model.layers.0.mlp.experts"]
    assert (status, reason) == ("skipped", "down_proj: 48 inputs, not a multiple of 32")
    with pytest.raises(accel.errors.SkippedSite, match="down_proj: 48 inputs"):
        accel.optimize(make("qwen3-moe"), weights="int4-g32", strict=True)


def test_attributes_that_would_be_hidden_are_named():
    model = mixture("mixtral")
    model.model.layers[1].mlp.experts.scheme = "theirs"
    accel.optimize(model, weights="int8")
    assert sites(model)["model.layers.1.mlp.experts"] == ("skipped", "it has an attribute scheme of its own")
    assert sites(model)["model.layers.0.mlp.experts"][0] == "patched"


def test_hooked_experts_are_left():
    model = mixture("mixtral")
    model.model.layers[0].mlp.experts.register_forward_hook(lambda *given: None)
    accel.optimize(model, weights="int8")
    assert sites(model)["model.layers.0.mlp.experts"] == ("skipped", "forward hooks")


def test_float8_is_for_gpus_that_read_it(monkeypatch):
    gpu, fp8 = torch.device("cuda"), Scheme("fp8")
    for capability, wanted in (((8, 0), "float8 below compute capability 8.9"), ((8, 9), None), ((9, 0), None)):
        monkeypatch.setattr(choice, "capability", lambda device, found=capability: found)
        reason = choice._unread(gpu, fp8)
        assert reason is wanted is None or wanted in reason
        assert choice._unread(gpu, Scheme("int8")) is None is choice._unread(torch.device("cpu"), fp8)


def test_calibrated_models_keep_them_in_their_dtype_until_they_are_optimized():
    model = accel.quantize(mixture("mixtral"), "int8")
    kind = type(model.model.layers[0].mlp.experts)
    assert kind is not QuantizedExperts
    accel.optimize(model, weights="int8")
    assert {type(one) for one in of_experts(model).values()} == {QuantizedExperts}
    assert {row["path"].rpartition(".")[2] for row in accel.report(model).weights} == {*STACKS}
    accel.restore(model)
    assert {type(one) for one in of_experts(model).values()} == {kind}
