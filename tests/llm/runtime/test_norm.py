"""Single norms of language models: gated ones, in groups, and torch's promotion of dtypes."""

import copy
import pickle
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.functional import silu

import accel
from accel.fusion.norm_kind import norm_kind, rms_norm_kinds
from accel.fusion.norms import match_rms_norm
from accel.llm.attention.linear.linear_attention import LinearSpec
from accel.options import Options
from accel.patching.rule import ForwardPatch, Rule, Site
from accel.planning.plan import create_context
from support.compatibility.tiny_language_models import build
from support.llm.families import padded


def norms(model) -> list[str]:
    return [status for _, rule, status, _ in accel.report(model).sites if rule == "RMS norm"]


def test_gated_norms_are_fused_and_compute_what_stock_does(tiny, monkeypatch):
    """Where the layers around them are not: Mamba-2 in 16 bits norms in fp32 what it has in fp32, by 16-bit weights."""
    monkeypatch.setattr(LinearSpec, "understand", classmethod(lambda *_: None))
    model = build("mamba2", "language").to(torch.bfloat16)
    stock, before = copy.deepcopy(model), tiny.snapshot(model)
    ids, mask = padded()
    accel.optimize(model)
    gated = [name for name, module in model.named_modules() if "NormGated" in type(module).__name__]
    assert gated and set(norms(model)) == {"patched"} and len(norms(model)) > len(gated)
    assert all("forward" in vars(model.get_submodule(name)) for name in gated)
    for call in ({"input_ids": ids, "attention_mask": mask}, {"input_ids": ids[:1, :1]}):
        ours, theirs = model(**call).logits, stock(**call).logits
        shown = call.get("attention_mask", torch.ones_like(call["input_ids"])).bool()
        error = (ours - theirs)[shown].abs().max() / theirs[shown].abs().max()
        assert error < 3e-2
    assert not accel.report(model).fallbacks
    accel.restore(model)
    tiny.assert_same_state(before, tiny.snapshot(model))


# -- what a norm is told by --------------------------------------------------------------------------------------------


class Gated(nn.Module):
    """In the middle: what a subclass says of groups, order and activation."""

    size, before, act, eps = 8, True, staticmethod(silu), 1e-5

    def __init__(self, channels=24):
        super().__init__()
        self.weight, self.epsilon, self.part = nn.Parameter(torch.rand(channels) + 0.5), self.eps, self.size

    def forward(self, x, z=None):
        h = x.float()
        if self.before and z is not None:
            h = h * self.act(z.float())
        h = h.unflatten(-1, (-1, self.part))
        h = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.epsilon)).flatten(-2)
        h = self.weight * h.to(x.dtype)
        return h if self.before or z is None else (h * self.act(z.float())).to(x.dtype)


class After(Gated):
    before, act, size = False, staticmethod(torch.sigmoid), 24


class Tanh(Gated):
    act = staticmethod(torch.tanh)


class Added(Gated):
    def forward(self, x, z=None):
        return super().forward(x) if z is None else super().forward(x) + z


def test_gates_and_groups_are_told_by_what_they_compute():
    plain, gated = rms_norm_kinds(Gated())
    assert (plain.groups, plain.gate, gated.groups, gated.gate) == (3, None, 3, ("silu", True))
    plain, gated = rms_norm_kinds(After())
    assert (plain.groups, gated.gate) == (1, ("sigmoid", False))
    assert norm_kind(After()) is not None and norm_kind(Gated()) is None
    for other in (Tanh(), Added()):
        plain, gated = rms_norm_kinds(other)
        assert plain is not None and gated is None
    assert rms_norm_kinds(nn.LayerNorm(24)) == (None, None)


def fused(norm):
    """The norm with its fast forward in place, its untouched copy, and what made calls run stock so far."""
    stock = copy.deepcopy(norm.eval())
    context = create_context(Options())
    ForwardPatch(norm, Rule("norm", match_rms_norm).answer(Site("norm", norm), context).forward).apply()
    return norm, stock, lambda: [reason for _, reason, _ in context.log.rows()]


@pytest.mark.parametrize("kind", [Gated, After, Added])
def test_a_gate_by_any_name_and_arguments_of_any_kind(kind):
    norm, stock, reasons = fused(kind())
    x, z = torch.randn(2, 5, 24), torch.randn(2, 5, 48)[..., 24:]
    for args, kwargs in (((x,), {}), ((x, z), {}), ((x,), {"z": z}), ((), {"x": x, "z": z}), ((x, None), {})):
        torch.testing.assert_close(norm(*args, **kwargs), stock(*args, **kwargs))
    assert reasons() == (["with a gate it is no norm known here"] if kind is Added else [])
    torch.testing.assert_close(norm(x, z[0]), stock(x, z[0]))  # which is broadcast
    with pytest.raises(TypeError):
        norm(x, z, x)
    assert len(reasons()) == 2
    copied = pickle.loads(pickle.dumps(norm))
    torch.testing.assert_close(copied(x, z), stock(x, z))


@pytest.mark.parametrize(("name", "value"), [("part", 12), ("epsilon", 0.5)])
def test_settings_changed_later_are_obeyed(name, value):
    norm, stock, reasons = fused(Gated())
    x = torch.randn(2, 24)
    for one in (norm, stock):
        setattr(one, name, value)
    torch.testing.assert_close(norm(x), stock(x))
    assert reasons() == [f"Gated.{name} was changed after accel.optimize"]


def promoting() -> dict:
    from diffusers.models.normalization import RMSNorm
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    return {
        "weight last": LlamaRMSNorm(24),
        "cast back": GemmaRMSNorm(24),
        "to the weight's": T5LayerNorm(24),
        "to the weight's in 16 bits": RMSNorm(24, 1e-5),
        "torch's": nn.RMSNorm(24, eps=1e-5),
        "gated": Gated(),
    }


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("name", promoting())
def test_dtypes_are_promoted_as_stock_does(name):
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for held, given in product(dtypes, dtypes):
        norm, stock, reasons = fused(promoting()[name].to(held))
        x = torch.randn(3, 24).to(given)
        ours, theirs = norm(x), stock(x)
        assert ours.dtype == theirs.dtype
        error = (ours.double() - theirs.double()).abs().max()
        assert error <= 8 * max(torch.finfo(dtype).eps for dtype in (held, given))  # numbers up to 4, rounded twice
        assert not reasons() or given != held
        assert bool(reasons()) or theirs.dtype == given


class Rms(nn.Module):
    def __init__(self, size, offset=0.0, eps=1e-6):
        super().__init__()
        self.weight, self.offset, self.variance_epsilon = nn.Parameter(torch.ones(size)), offset, eps

    def forward(self, x):
        return (self.weight + self.offset) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


class Twice(Rms):
    def forward(self, x):
        return super().forward(super().forward(x))


class Halved(Rms):
    def forward(self, x):
        return super().forward(x) * 0.5


def test_norms_are_told_by_what_they_compute():
    plain, gemma = norm_kind(Rms(12)), norm_kind(Rms(12, offset=1.0))
    assert (plain.centered, plain.offset, plain.bias, plain.eps) == (False, 0.0, None, "variance_epsilon")
    assert (gemma.centered, gemma.offset) == (False, 1.0)
    layer = norm_kind(nn.LayerNorm(12))
    assert (layer.centered, layer.weight, layer.bias) == (True, "weight", "bias")
    assert norm_kind(nn.LayerNorm(12, bias=False)).bias is None
    assert norm_kind(nn.LayerNorm(12, elementwise_affine=False), 12).weight is None


@pytest.mark.parametrize(
    "module",
    [Twice(12), Halved(12), nn.Linear(12, 12), nn.ReLU(), nn.GroupNorm(2, 12), nn.BatchNorm1d(12)],
    ids=repr,
)
def test_what_is_no_norm_is_not_taken_for_one(module):
    assert norm_kind(module, 12) is None
