"""Routers of mixtures: recognized by what they compute, equal to stock's, left where they or what they hold changed."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accel_kernels import Routing
from torch import nn

import accel
from accel.llm.moe.router import RouterForward
from accel.llm.moe.router_formula import GIVEN, RouterFormula, holds_router, router_formulas
from support.llm.families import make, prompt
from support.llm.near_ties import assert_routed_alike, now, routers
from support.noted import noted

AFTER, BEFORE = Routing(2, "none", "softmax"), Routing(2)
GROUPED = Routing(2, "sigmoid", "sum", eps=1e-20, groups=2, kept=1)
CORRECTION = "e_score_correction_bias"
# How it chooses by family, and how many routers there are; softmax and a sum of the chosen is a softmax over these.
ROUTINGS = {
    "mixtral": (AFTER, 2),
    "qwen2-moe": (BEFORE, 2),
    "qwen2-moe-some-dense": (BEFORE, 1),
    "qwen3-moe": (AFTER, 2),
    "olmoe": (BEFORE, 2),
    "granite-moe": (AFTER, 2),
    "gpt-oss": (AFTER, 2),
    "glm4-moe": (GROUPED, 1),
    "ernie-moe": (Routing(2, share="sum"), 1),
    "deepseek-v3": (GROUPED._replace(scale=2.5), 1),
    "qwen3-next": (AFTER, 2),
    "longcat": (Routing(3, scale=6.0), 2),
    "kolibri": (Routing(2, "sigmoid", by_logits=True), 2),
}


def taken(monkeypatch) -> list[int]:
    """The numbers of tokens of the fused calls to come."""
    return noted(monkeypatch, RouterForward, "fast", lambda self, x, *more, **named: x.numel() // x.shape[-1])


def built(name: str, dtype: torch.dtype = torch.float32, **changes) -> nn.Module:
    """A model whose biases for the choice count."""
    model = make(name, dtype, **changes)
    for path, tensor in (*model.named_buffers(), *model.named_parameters()):
        if CORRECTION in path:
            tensor.data.copy_(torch.rand(tensor.shape, generator=torch.Generator().manual_seed(len(path))) - 0.5)
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", ROUTINGS)
def test_recognized_told_and_equal_to_stock(name, monkeypatch):
    routing, many = ROUTINGS[name]
    stock = built(name)
    ours = accel.optimize(copy.deepcopy(stock))
    found = routers(ours)
    assert [now(forward).routing for forward in found.values()] == [routing] * many
    told = {path: status for path, rule, status, _ in accel.report(ours).sites if rule == "router"}
    assert told == dict.fromkeys(found, "patched")
    tokens = taken(monkeypatch)
    for length in (3, 21):
        torch.testing.assert_close(
            ours(prompt(2, length)).logits, stock(prompt(2, length)).logits, rtol=1e-4, atol=1e-4
        )
    assert tokens == [6] * many + [42] * many
    assert not {path for path, *_ in accel.report(ours).fallbacks} & found.keys()
    accel.restore(ours)
    assert not routers(ours)
    assert torch.equal(ours(prompt(1, 5)).logits, stock(prompt(1, 5)).logits)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["qwen3-moe", "granite-moe", "gpt-oss", "glm4-moe", "ernie-moe"])
@pytest.mark.share(10)
@pytest.mark.turns(2)
def test_returns_what_stock_returns(name, dtype):
    """In order, form and dtype; shares to the last digit but one."""
    model = accel.optimize(built(name, dtype))
    for forward in routers(model).values():
        x = torch.randn(7, 64, dtype=dtype)
        for given in (x, x[:1], x[::2], x.view(1, 7, 64))[: 4 if 3 in now(forward).dims else 3]:
            assert_routed_alike(forward(given), forward.stock(given), 1.0 if dtype == torch.float32 else 0.7)
    assert not accel.report(model).fallbacks


class Linear(nn.Module):
    """A router of DeepSeek's kind. CHANGES: parts of its formula in words of its own."""

    def __init__(self, experts: int = 12, hidden: int = 48, **changes) -> None:
        super().__init__()
        self.top_k, self.num_experts, self.n_group, self.topk_group, self.factor = 3, experts, 3, 2, 1.5
        self.weight = nn.Parameter(torch.randn(experts, hidden) * hidden**-0.5)
        self.register_buffer(CORRECTION, torch.rand(experts) - 0.5)
        vars(self).update(changes)


class Sigmoid(Linear):
    def forward(self, hidden_states):
        logits = F.linear(hidden_states.float(), self.weight.float())
        scores = logits.sigmoid()
        index = torch.topk(scores + self.e_score_correction_bias, self.top_k, dim=-1, sorted=False)[1]
        shares = scores.gather(1, index)
        return logits, self.factor * shares / (shares.sum(-1, keepdim=True) + 1e-9), index


class Masked(Linear):
    """Groups that are not chosen from count as 0, which is more than what is below."""

    def forward(self, hidden_states):
        logits = F.linear(hidden_states.float(), self.weight.float())
        scores = logits.softmax(-1)
        choice = scores + self.e_score_correction_bias
        groups = choice.view(len(choice), self.n_group, -1)
        kept = groups.topk(2, dim=-1)[0].sum(-1).topk(self.topk_group, dim=-1)[1]
        mask = torch.zeros_like(groups[..., 0]).scatter(1, kept, 1.0).bool()
        choice = torch.where(mask[..., None], groups, 0.0).flatten(1)
        index = choice.topk(self.top_k, dim=-1)[1]
        return scores.gather(1, index), index


class Given(Linear):
    def forward(self, hidden_states, bias):
        logits = F.linear(hidden_states, self.weight)
        index = (logits.sigmoid() + bias).topk(self.top_k, dim=-1).indices
        return index, logits.sigmoid().gather(1, index).clamp(min=0.0), logits


class Capped(Linear):
    def forward(self, hidden_states):
        logits = 30.0 * torch.tanh(F.linear(hidden_states, self.weight) / 30.0)
        shares, index = logits.softmax(-1).topk(self.top_k, dim=-1)
        return logits, shares, index


class Limited(Linear):
    """As usual for usual tokens."""

    def forward(self, hidden_states):
        logits = F.linear(hidden_states, self.weight)
        shares, index = logits.sigmoid().topk(self.top_k, dim=-1)
        return logits, (shares / shares.sum(-1, keepdim=True)).clamp(max=0.9), index


class Worst(Linear):
    def forward(self, hidden_states):
        logits = F.linear(hidden_states, self.weight)
        shares, index = logits.softmax(-1).topk(self.top_k, dim=-1, largest=False)
        return logits, shares, index


class Configured(Linear):
    def forward(self, hidden_states):
        logits = F.linear(hidden_states, self.weight)
        shares, index = logits.softmax(-1).topk(self.config.top_k, dim=-1)
        return logits, shares, index


def formula_of(module: nn.Module) -> RouterFormula:
    found = router_formulas(module)
    assert isinstance(found, dict), found
    return found[(torch.float32,) * 3]


def test_a_formula_is_found_by_what_is_computed():
    found = formula_of(Sigmoid())
    assert found.correction == CORRECTION and found.routing == Routing(3, "sigmoid", "sum", eps=1e-9, scale=1.5)
    found = formula_of(Masked())
    assert found.routing == Routing(3, "softmax", groups=3, kept=2, outside=0.0) and found.outputs == (
        "shares",
        "index",
    )
    found = formula_of(Given())
    assert found.correction == GIVEN and found.outputs == ("index", "shares", "logits") and found.dims == (2,)
    assert formula_of(Sigmoid(factor=1)).routing.scale == 1.0


@pytest.mark.parametrize("kind", [Capped, Limited, Worst, Configured])
def test_another_formula_is_left(kind):
    module = kind(config=SimpleNamespace(top_k=3))
    assert holds_router(module) and isinstance(router_formulas(module), str)


def test_what_is_no_router_is_not_looked_at():
    model = make("llama")
    assert not [path for path, module in model.named_modules() if holds_router(module)]
    few = [type(module).__name__ for module in make("phi-moe").modules() if holds_router(module)]
    assert few == []  # it searches its largest numbers itself


@torch.no_grad()
def test_a_bias_given_by_the_caller():
    from accel_kernels.attention.backends import AttentionChooser
    from accel_kernels.gemm.linear import torch_linear

    from accel.patching.fallback_log import FallbackLog
    from accel.patching.fast_forward import Kernels

    module, kernels = Given().eval(), Kernels(AttentionChooser("sdpa"), torch_linear)
    forward = RouterForward(module, "", kernels, FallbackLog(), router_formulas(module))
    x, bias = torch.randn(5, 48), torch.rand(12)
    for args, named in (((x, bias), {}), ((x,), {"bias": bias}), ((), {"hidden_states": x, "bias": bias})):
        assert forward.unfit(*args, **named) is None
        for ours, stock in zip(forward.fast(*args, **named), module(x, bias), strict=True):
            torch.testing.assert_close(ours, stock)
    assert "bias" in forward.unfit(x, None) and "bias" in forward.unfit(x, bias[:3])
    assert "shape" in forward.unfit(x[:, :40], bias) and "shape" in forward.unfit(x[:0], bias)
    assert "float64" in forward.unfit(x.double(), bias)


@torch.no_grad()
@pytest.mark.parametrize("change", ["top_k", "weight", "buffer", "forward"])
def test_a_change_is_noticed(change, monkeypatch):
    stock = built("glm4-moe")
    ours = accel.optimize(copy.deepcopy(stock))
    (path,) = routers(ours)
    tokens, ids = taken(monkeypatch), prompt(1, 5)
    for model in (ours, stock):
        gate = model.get_submodule(path)
        if change == "top_k":
            gate.top_k = 1
        elif change == "weight":  # read where it lies
            gate.weight = nn.Parameter(gate.weight.flip(0))
        elif change == "buffer":
            setattr(gate, CORRECTION, getattr(gate, CORRECTION).flip(0))
    if change == "forward":
        plain = type(gate).forward
        monkeypatch.setattr(type(gate), "forward", lambda self, x: plain(self, -x))
    torch.testing.assert_close(ours(ids).logits, stock(ids).logits, rtol=1e-4, atol=1e-4)
    assert tokens == ([5] if change in ("weight", "buffer") else [])


@torch.no_grad()
def test_router_logits_are_recorded():
    stock = built("qwen3-moe")
    ours, ids = accel.optimize(copy.deepcopy(stock)), prompt(2, 6)
    found, wanted = (model(ids, output_router_logits=True).router_logits for model in (ours, stock))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_move_to_another_dtype_is_followed(monkeypatch):
    ours = accel.optimize(built("ernie-moe"))
    tokens = taken(monkeypatch)
    ours.to(torch.bfloat16)(prompt(1, 4))
    assert tokens == [4]
