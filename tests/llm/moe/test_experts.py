"""Experts of a mixture: recognized however they are stored, taken for any number of tokens, left where they changed."""

from dataclasses import replace

import pytest
import torch
from accel_kernels import experts
from accel_kernels.moe.weights import Gating
from torch import nn

import accel
from accel.llm.moe.experts import ExpertFormula, ExpertsForward
from accel.patching.rule import MISSING
from support.kernels.waiting import NothingWaits
from support.llm.families import make, prompt
from support.llm.near_ties import deep_gpt_oss
from support.llm.optimized_models import optimized, pair
from support.noted import noted

BY_ROWS = ExpertFormula(("gate_up_proj", "down_proj"), (), False, False, Gating())
BY_ROWS_AND_IDLE = replace(BY_ROWS, idle=2)
GPT_OSS = ExpertFormula(
    ("gate_up_proj", "down_proj"),
    ("gate_up_proj_bias", "down_proj_bias"),
    transposed=True,
    interleaved=True,
    gating=Gating("silu", 1.702, 7.0, 1.0),
)
# The formula by family, and how many layers have experts.
FORMULAS = {
    "mixtral": (BY_ROWS, 2),
    "qwen2-moe": (BY_ROWS, 2),
    "qwen2-moe-some-dense": (BY_ROWS, 1),
    "qwen3-moe": (BY_ROWS, 2),
    "olmoe": (BY_ROWS, 2),
    "granite-moe": (BY_ROWS, 2),
    "phi-moe": (BY_ROWS, 2),
    "glm4-moe": (BY_ROWS, 1),
    "deepseek-v3": (BY_ROWS, 1),  # beside an expert that all share
    "qwen3-next": (BY_ROWS, 2),
    "gpt-oss": (GPT_OSS, 2),
    "longcat": (BY_ROWS_AND_IDLE, 2),
}


def fused(model: nn.Module) -> dict[str, ExpertsForward]:
    found = {path: vars(module).get("forward") for path, module in model.named_modules()}
    return {path: forward for path, forward in found.items() if type(forward) is ExpertsForward}


def taken(monkeypatch) -> list[int]:
    """The numbers of tokens of the fused calls to come."""
    return noted(monkeypatch, ExpertsForward, "fast", lambda self, x, *more: len(x))


@torch.no_grad()
@pytest.mark.parametrize("name", FORMULAS)
def test_recognized_and_taken_for_any_number_of_tokens(name, monkeypatch):
    formula, many = FORMULAS[name]
    ours, stock = pair(name)
    assert [forward.formula for forward in fused(ours).values()] == [formula] * many
    tokens = taken(monkeypatch)
    for length in (3, 40):
        torch.testing.assert_close(
            ours(prompt(1, length)).logits, stock(prompt(1, length)).logits, rtol=1e-4, atol=1e-4
        )
    assert tokens == [3] * many + [40] * many


@torch.no_grad()
@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.share(12)
def test_nothing_waits_from_the_router_to_the_sum(name, tokens, monkeypatch):
    """As on a GPU, but for what the kernels compute; a CUDA graph can hold it."""
    pytest.importorskip("triton")
    from accel_kernels.moe import experts_triton

    model = optimized(name)
    wholes = {path.rpartition(".")[0] for path in fused(model)}
    launched = []
    monkeypatch.setattr(experts_triton, "launch", lambda kernel, grid, *args, **meta: launched.append(kernel))
    called = type(experts).__call__
    ways = {"experts": lambda self, *args: self.triton(*args), "route": lambda self, *args: self.triton(*args)}
    monkeypatch.setattr(type(experts), "__call__", lambda self, *args: ways.get(self.name, called)(self, *args))
    with NothingWaits():
        for path in wholes:
            model.get_submodule(path)(torch.randn(1, tokens, 64))
    few = 2 + FORMULAS[name][0].transposed  # a sum of its own
    assert len(launched) == len(wholes) * (few if tokens == 3 else 4)
    assert not accel.report(model).fallbacks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_recognized_in_16_bits(name, dtype):
    formula, many = FORMULAS[name]
    assert [forward.formula for forward in fused(accel.optimize(make(name, dtype))).values()] == [formula] * many


@torch.no_grad()
@pytest.mark.parametrize("spread", [0.005, 0.02, 0.1, 1.0])
def test_experts_of_any_size_have_their_own_factor(spread):
    """Far below one, and far above, a sigmoid of 1.702 times the gate is as good as a plain one to bf16."""
    model = deep_gpt_oss(layers=1, spread=spread)
    experts = model.model.layers[0].mlp.experts
    for bias in (experts.gate_up_proj_bias, experts.down_proj_bias):
        bias.mul_(10 * spread)
    accel.optimize(model)
    assert vars(experts)["forward"].formula.gating == Gating("silu", 1.702, 7.0, 1.0)


@torch.no_grad()
@pytest.mark.parametrize(("name", "setting", "value"), [("mixtral", "act_fn", nn.GELU()), ("gpt-oss", "limit", 0.25)])
def test_another_setting_is_noticed(name, setting, value, monkeypatch):
    ours, stock = pair(name)
    tokens, ids = taken(monkeypatch), prompt(1, 5)
    for model in (ours, stock):
        setattr(model.model.layers[1].mlp.experts, setting, value)
    torch.testing.assert_close(ours(ids).logits, stock(ids).logits, rtol=1e-4, atol=1e-4)
    assert tokens == [5]


def gate_clamped_after(self, gate_up):
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    glu = (gate * torch.sigmoid(gate * self.alpha)).clamp(max=self.limit)
    return (up.clamp(-self.limit, self.limit) + 1) * glu


def gate_unclamped_below(self, gate_up):
    gate, up = gate_up[..., ::2].clamp(max=self.limit), gate_up[..., 1::2].clamp(max=self.limit)
    return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


@pytest.mark.parametrize("gate", [gate_clamped_after, gate_unclamped_below])
@pytest.mark.parametrize("limit", [7.0, 100.0])
def test_a_gate_that_bends_elsewhere_is_left(gate, limit, monkeypatch):
    """Small numbers show nothing of it."""
    model = make("gpt-oss")
    monkeypatch.setattr(type(model.model.layers[0].mlp.experts), "_apply_gate", gate)
    for layer in model.model.layers:
        layer.mlp.experts.limit = limit
    before = {path: vars(module).get("forward", MISSING) for path, module in model.named_modules() if "experts" in path}
    accel.optimize(model)
    assert not fused(model)
    assert {path: vars(model.get_submodule(path)).get("forward", MISSING) for path in before} == before


@torch.no_grad()
def test_named_arguments_are_taken(monkeypatch):
    ours, stock = pair("gpt-oss")
    for model in (ours, stock):
        model.set_experts_implementation("eager")  # others take them by place alone
    tokens = noted(monkeypatch, ExpertsForward, "fast", lambda self, *args, **given: tuple(sorted(given)))
    index, shares = torch.tensor([[0, 3], [2, 1]]), torch.rand(2, 2)
    found = [
        model.model.layers[0].mlp.experts(torch.ones(2, 64), routing_weights=shares, router_indices=index)
        for model in (ours, stock)
    ]
    torch.testing.assert_close(*found)
    assert tokens == [("router_indices", "routing_weights")]
