"""Experts with quantized weights: computed, carried over, or left alone."""

import copy
import functools
import json

import pytest
import torch
from accel_kernels.device import Card, replayed
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import accel
from accel.llm.moe.experts import ExpertsForward
from accel.llm.ptq import model as choice
from accel.quantization.experts import QuantizedExperts
from accel.quantization.scheme import Scheme
from support.llm.families import BY_NAME, make, prompt
from support.llm.outputs import ran_fast, same, write_alike
from support.llm.quantized import (
    MIXTURES,
    STACKS,
    mixture,
    of_experts,
    quantized_pair,
    rounded,
    sites,
)

SCHEMES = ("int8", "int8-asym", "int4-g32", "int4-g32-asym", "fp8")
quantized = functools.cache(quantized_pair)  # not to be changed


@pytest.mark.parametrize(("name", "weights"), [(name, SCHEMES[n % 5]) for n, name in enumerate(MIXTURES)])
def test_every_family(name, weights):
    ours, twin = quantized(name, weights)
    found = of_experts(ours)
    assert len(found) == MIXTURES[name][0] and {type(one) for one in found.values()} == {QuantizedExperts}
    assert {type(vars(one)["forward"]) for one in found.values()} == {ExpertsForward}
    rows, told = {row["path"]: row for row in accel.report(ours).weights}, sites(ours)
    for path, module in found.items():
        original = twin.get_submodule(path)
        assert told[path] == ("patched", str(module.scheme)) and module.kind is type(original)
        assert dict(module.named_parameters()).keys() == dict(original.named_parameters()).keys() - {*STACKS}
        for stack in STACKS:
            row, exact = rows[f"{path}.{stack}"], getattr(original, stack)
            assert row["bytes_before"] == exact.nbytes and row["reversible"]
            held = [tensor for part, tensor in module.named_buffers() if part.startswith(f"{stack}_")]
            assert row["bytes_after"] == sum(tensor.nbytes for tensor in held) < 0.35 * exact.nbytes  # of float32
    for tokens in (3, 40):
        ids = prompt(1, tokens)
        torch.testing.assert_close(ours(ids).logits, twin(ids).logits, rtol=1e-4, atol=1e-4)
    write_alike(ours, twin)
    assert not accel.report(ours).fallbacks
    if BY_NAME[name].expected == "fast":
        ran_fast(ours)


@pytest.mark.parametrize(("name", "weights"), [("qwen3-moe", "int4-g32"), ("gpt-oss", "fp8")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.share(3)
@pytest.mark.turns(2)
def test_in_16_bits_as_near_as_stock_over_the_same_values(name, weights, dtype):
    """Each expert by itself: a router may choose otherwise by rounding."""
    ours, twin = quantized(name, weights, dtype)
    x, index = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(dtype), torch.arange(8)[:, None] % 4
    for path, module in of_experts(ours).items():
        original = twin.get_submodule(path)
        given = (index, torch.ones(8, 1, dtype=dtype))
        exact = copy.deepcopy(original).float()
        wanted = exact(x.float(), given[0], given[1].float())
        own, mine = ((one(x, *given).float() - wanted).norm() for one in (original, module))
        assert mine <= 1.5 * own
        assert module.dtype == dtype and not accel.report(ours).fallbacks


@pytest.mark.parametrize(
    ("name", "setting", "value", "told"),
    [("gpt-oss", "limit", 0.25, "limit"), ("mixtral", "act_fn", nn.GELU(), "GELU")],
)
def test_what_is_set_meanwhile_counts_and_stays(name, setting, value, told):
    (ours, twin), before = quantized_pair(name), mixture(name)
    for model in (ours, twin, before):
        setattr(model.model.layers[0].mlp.experts, setting, value)
    same({"x": ours(prompt()).logits}, {"x": twin(prompt()).logits})
    assert told in str(accel.report(ours).fallbacks)
    accel.restore(ours)
    assert torch.equal(ours(prompt()).logits, before(prompt()).logits)


def test_other_code_of_the_class_is_noticed(monkeypatch):
    ours, twin = quantized_pair("gpt-oss")
    kind = type(twin.model.layers[0].mlp.experts)
    wanted = ours(prompt()).logits
    with monkeypatch.context() as patch:
        patch.setattr(kind, "_apply_gate", lambda self, y: y[..., ::2].contiguous())
        same({"x": ours(prompt()).logits}, {"x": twin(prompt()).logits})
        assert not torch.allclose(ours(prompt()).logits, wanted)
    assert torch.equal(ours(prompt()).logits, wanted)


def test_an_implementation_of_the_users_is_called(monkeypatch):
    (ours, twin), calls = quantized_pair("mixtral"), []

    def theirs(self, x, index, shares):
        calls.append((type(self), self.gate_up_proj.shape, self.num_experts))
        return 2 * ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, x, index, shares)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "theirs", theirs)
    for model in (ours, twin):
        model.set_experts_implementation("theirs")
    same({"x": ours(prompt()).logits}, {"x": twin(prompt()).logits})
    experts = twin.model.layers[0].mlp.experts
    assert calls == [(type(experts), experts.gate_up_proj.shape, 4)] * 4


# -- stock code over the numbers: training, autocast, the compiler -----------------------------------------------------


@torch.enable_grad()
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_gradients_are_those_over_the_same_values(name):
    ours, twin = quantized(name, "int8")
    found = []
    for model in (ours, twin):
        experts = next(iter(of_experts(model).values()))
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        shares = torch.rand(5, 2, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = experts(x, torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2]]), shares)
        biases = [one for stack, one in experts.named_parameters() if stack not in STACKS]
        found.append((y, *torch.autograd.grad(y.square().sum(), (x, shares, *biases))))
    assert len(found[0]) == (5 if name == "gpt-oss" else 3)
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_training_and_autocast_run_stock_code():
    ours, twin = (copy.deepcopy(model) for model in quantized("qwen3-moe", "int8"))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ours(prompt()).logits, twin(prompt()).logits, rtol=0.02, atol=0.02)
    assert "autocast is on" in str(accel.report(ours).fallbacks)
    for model in (ours, twin):
        model.train()
    same({"x": ours(prompt()).logits}, {"x": twin(prompt()).logits})
    assert "training mode" in str(accel.report(ours).fallbacks)


class Lent(torch.nn.Module):
    def forward(self, given):
        vars(Lent.__new__(Lent)).update(vars(self))
        return given


def test_the_compiler_takes_it_whole():
    try:
        torch.compile(Lent(), fullgraph=True, backend="eager")(torch.ones(1))
    except torch._dynamo.exc.Unsupported:
        pytest.skip("torch 2.10's compiler does not follow vars(module).update: its graph breaks there")
    ours, twin = quantized("mixtral", "int8")
    module, original = (next(iter(of_experts(model).values())) for model in (ours, twin))
    given = torch.randn(4, 64), torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]]), torch.rand(4, 2)
    with torch.no_grad():
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(*given), original(*given))


@pytest.mark.turns(2)
def test_verify_judges_them():
    quality = accel.verify(quantized_pair("gpt-oss", "int4-g32", torch.bfloat16)[0])
    assert quality.passed and quality.parts["each expert"].passed, str(quality)


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
@pytest.mark.turns(2)
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


def test_experts_of_another_formula_are_left(monkeypatch):
    model = mixture("gpt-oss")
    kind = type(model.model.layers[0].mlp.experts)
    monkeypatch.setattr(kind, "_apply_gate", lambda self, y: y[..., ::2].clamp(max=self.limit) * 3)
    accel.optimize(model, weights="int8")
    assert {type(one) for one in of_experts(model).values()} == {kind}
    status, reason = sites(model)["model.layers.0.mlp.experts"]
    assert status == "skipped" and ("library's own" in reason or "computes something else" in reason)
    assert sites(model)["model.layers.0.self_attn.q_proj"][0] == "patched"


LEFT = {  # by the reason: the model, its weights, and what is done to the experts of a layer
    "down_proj: 48 inputs, not a multiple of 32": ("qwen3-moe", "int4-g32", lambda experts: None),  # in both layers
    "it has an attribute scheme of its own": ("mixtral", "int8", lambda experts: setattr(experts, "scheme", "theirs")),
    "forward hooks": ("mixtral", "int8", lambda experts: experts.register_forward_hook(lambda *given: None)),
}


@pytest.mark.parametrize("reason", LEFT)
@pytest.mark.share(1)
def test_experts_that_are_left_are_named(reason):
    name, weights, change = LEFT[reason]
    model = make(name)
    change(model.model.layers[1].mlp.experts)
    with pytest.raises(accel.errors.SkippedSite, match=reason):
        accel.optimize(model, weights=weights, strict=True)
    accel.optimize(model, weights=weights)
    assert sites(model)["model.layers.1.mlp.experts"] == ("skipped", reason)
    assert (sites(model)["model.layers.0.mlp.experts"][0] == "patched") == (name == "mixtral")


def test_float8_is_for_gpus_that_read_it():
    gpu, fp8 = torch.device("cuda"), Scheme("fp8")
    for compute, wanted in (((8, 0), "without float8 conversions"), ((8, 9), None), ((9, 0), None)):
        with replayed(Card("", compute, 108, 163 * 1024)):
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
