"""Blocks of diffusion transformers, the norms inside, and heads."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from accel_kernels import rowwise
from torch import nn

import accel
from accel.diffusion.dit.block import BlockForward
from accel.diffusion.dit.executable import Executable
from accel.fusion.norms import LayerNormForward
from accel.options import Options
from accel.planning.plan import create_context
from support.compatibility import diffusers_calls, tiny_diffusers_models
from support.compatibility.comparison import apart, same, seeded, tensors
from support.compatibility.compatibility_table import diffusion_classes
from support.compatibility.diffusers_calls import inputs
from support.compatibility.tiny_diffusers_models import build
from support.compatibility.transformer_pair import FLUX
from support.diffusion.outputs import in_dtype
from support.diffusion.programs import Formula, Planned, as_complex, assigned, halves, rand
from support.noted import call_counts, noted
from support.patched import fast_forwards, sites

CLASSES = sorted(name for name in diffusion_classes() if "Transformer" in name)
FAR = 3e-5  # of the largest number in a result: sums in another order, over a few layers
# What the report says of blocks that run stock.
REASONS = {
    "AnyFlowFARTransformer3DModel": "an argument that is neither a tensor nor a plain value",
    "HiDreamImageTransformer2DModel": "bincount: goes by what a tensor holds",
    "Kandinsky6SRTransformer3DModel": "new_zeros: takes a tensor that is neither an argument nor a weight",
    "MochiTransformer3DModel": "nonzero: goes by what a tensor holds",
}
WITHOUT = {"DreamLiteTransformer2DModel", "Transformer2DModel", "TransformerTemporalModel"}  # their blocks are UNets'
IN_16_BITS = (
    "ChromaTransformer2DModel",
    "CogVideoXTransformer3DModel",
    "FluxTransformer2DModel",
    "LTXVideoTransformer3DModel",
    "QwenImageTransformer2DModel",
    "SD3Transformer2DModel",
    "WanTransformer3DModel",
    "ZImageTransformer2DModel",
)


@pytest.fixture
def runs(monkeypatch):
    """How often blocks ran: by "fast" and "stock"."""
    return call_counts(monkeypatch, {"fast": (Executable, "__call__"), "stock": (BlockForward, "stock")})


def made(name):
    """A tiny model and what it is called with; skips where there is none in these versions or on this machine."""
    try:
        model = tiny_diffusers_models.build(name)
        return model, diffusers_calls.inputs(model)
    except Exception as error:
        pytest.skip(f"not built: {error}")


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.share(24)
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.turns(2)
def test_blocks_of_a_class(name, runs, tiny):
    model, given = made(name)
    stock = copy.deepcopy(model)

    def call(model):
        return model(**given)

    wanted = seeded(call, stock)
    accel.optimize(model, cpu="fuse")
    forwards = [vars(module)["forward"] for module in fast_forwards(model)]
    blocks = [forward for forward in forwards if isinstance(forward, BlockForward)]
    assert bool(blocks) == (name not in WITHOUT)
    for _ in range(3):  # the first call is recorded; in the second a tensor may have other strides, recorded once more
        runs.clear()
        got = seeded(call, model)
        for ours, theirs in zip(tensors(got), tensors(wanted), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=FAR * float(theirs.abs().max()))
    plans = [plan for block in blocks for plan in (block.known or {}).values()]
    reasons = {plan.reason for plan in plans if plan.reason}
    told = {reason for _, reason, _ in accel.report(model).fallbacks}
    assert all(plan.executable is not None and plan.compared for plan in plans if not plan.reason)
    if name in REASONS:
        assert told and reasons <= told and all(REASONS[name] in reason for reason in told), told
    else:
        assert not told and not reasons, told | reasons
        assert not runs["stock"] and bool(runs["fast"]) == bool(blocks)
    accel.restore(model)
    assert same(seeded(call, model), wanted) and not tiny.differences(model, stock)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        (
            "Flux2Transformer2DModel",
            {"transformer_blocks.0", "single_transformer_blocks.0"},
        ),  # of two linears, that one
        (
            "UNetSpatioTemporalConditionModel",
            {"temporal_transformer_blocks.0"},
        ),  # not its levels, whose parts have rules
    ],
)
def test_which_modules_are_blocks(name, blocks):
    model = accel.optimize(tiny_diffusers_models.build(name), cpu="fuse")
    paths = sites(model, "diffusion transformer block")
    assert {path.rpartition("attentions.0.")[2].rpartition("attentions.1.")[2] for path in paths} == blocks


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.share(4)
@pytest.mark.parametrize("name", IN_16_BITS)
def test_rounding_is_stocks_in_16_bits(name, runs):
    """Bit for bit, or at most twice as far from fp32 as stock is."""
    model, given = made(name)
    model.to(torch.bfloat16)
    exact = copy.deepcopy(model).to(torch.float32)
    given = in_dtype(given, torch.bfloat16)
    wanted = tensors(model(**given))
    accel.optimize(model, cpu="fuse")
    model(**given)
    runs.clear()
    got = tensors(model(**given))
    assert runs["fast"] and not runs["stock"]
    precise = tensors(exact(**in_dtype(given, torch.float32)))
    for ours, theirs, true in zip(got, wanted, precise, strict=True):
        if not torch.equal(ours, theirs):
            assert (ours.float() - true).norm() <= 2 * (theirs.float() - true).norm()


HIDREAM = "HiDreamImageTransformer2DModel"  # its blocks go by numbers


class Norms:
    """A model that counts its fused norms, beside a copy that is stock. inside: how many norms its blocks have."""

    def __init__(self, name, monkeypatch):
        self.model = build(name)
        self.stock, self.inputs = copy.deepcopy(self.model), inputs(self.model)
        accel.optimize(self.model, cpu="fuse")
        self.blocks = sites(self.model, "diffusion transformer block")
        self.ran = noted(monkeypatch, LayerNormForward, "fast", lambda forward, input: forward.beneath)

    @property
    def inside(self):
        return [one for one in map(lambda m: vars(m)["forward"], fast_forwards(self.model)) if one.beneath]

    def agree(self):
        """How many norms inside of blocks ran fused."""
        self.ran.clear()
        assert apart(self.model(**self.inputs), self.stock(**self.inputs)) < 1e-6
        return sum(self.ran)


@pytest.fixture
def norms(request, monkeypatch):
    return Norms(request.param, monkeypatch)


@torch.no_grad()
@pytest.mark.parametrize("norms", [HIDREAM], indirect=True)
def test_norms_of_blocks_that_cannot_be_recorded(norms):
    report = accel.report(norms.model)
    told = {path for path, rule, status, _ in report.sites if (rule, status) == ("layer norm", "patched")}
    assert norms.inside and {one.path for one in norms.inside} < told and norms.blocks
    assert norms.agree() == 0  # each block is recorded as it is written
    for _ in range(2):
        assert norms.agree() == len(norms.inside)
    assert {path for path, *_ in accel.report(norms.model).fallbacks} == set(norms.blocks)
    for copied in (copy.deepcopy(norms.model), pickle.loads(pickle.dumps(norms.model))):
        assert apart(copied(**norms.inputs), norms.stock(**norms.inputs)) < 1e-6
    accel.restore(norms.model)
    assert norms.agree() == 0 and not fast_forwards(norms.model)


@torch.no_grad()
@pytest.mark.parametrize("norms", [FLUX], indirect=True)
def test_norms_of_blocks_that_are_recorded(norms):
    norms.agree()
    assert norms.inside and norms.agree() == 0
    norms.model.train()
    norms.stock.train()
    assert norms.agree() == 0
    norms.model.eval()
    norms.stock.eval()
    fallbacks = accel.report(norms.model).fallbacks
    assert {path for path, *_ in fallbacks} == {*norms.blocks, "norm_out.norm"}  # a block tells for its norms
    assert norms.agree() == 0
    hooks = [norms.inside[0].module.register_forward_hook(lambda module, args, output: 2 * output)]
    hooks.append(norms.stock.get_submodule(norms.inside[0].path).register_forward_hook(lambda m, a, output: 2 * output))
    assert norms.agree() > 0
    for one in hooks:
        one.remove()
    assert norms.agree() == 0


def test_a_norm_without_weights_refuses_other_widths_as_stock_does():
    norm = nn.LayerNorm(16, elementwise_affine=False).eval()
    context = create_context(Options())
    forward = LayerNormForward(norm, "norm", context.kernels, context.log)
    with torch.no_grad():
        assert forward(torch.ones(2, 16)).shape == (2, 16)
        with pytest.raises(RuntimeError, match="normalized_shape"):
            forward(torch.ones(2, 32))


B, S, H, D = 2, 5, 3, 8
C = H * D


def norm(x, w):
    return F.rms_norm(x, (C,), w, 1e-6)


def norm_by_hand(x, w):
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def rotated(norm, rotation):
    def forward(x, cos, sin, w, wide):
        q = norm(F.linear(x, wide), w).unflatten(-1, (H, D))
        q = rotation(q, cos, sin).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q)

    return forward


def planned(forward, dtype=torch.float32, heads=1, **more):
    tables = [rand(1, S, heads, D, seed=seed) for seed in (2, 3)]
    module = Formula(forward, w=rand(C, seed=4, dtype=dtype), wide=rand(C, C, seed=5, dtype=dtype) / 4)
    return Planned(module, rand(B, S, C, dtype=dtype), *tables, **more)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, H])
@pytest.mark.parametrize("rotation", [assigned, as_complex], ids=lambda one: one.__name__)
@pytest.mark.parametrize("norm", [norm, norm_by_hand], ids=lambda one: one.__name__)
def test_they_are_one_pass(norm, rotation, heads, dtype):
    found = planned(rotated(norm, rotation), dtype, heads)
    (one,) = found.passes
    assert one.shape == (B, S) and one.program.width == C and "rms_norm" not in found.calls
    if rotation is as_complex and dtype is torch.float32:  # torch rounds once where a product and a sum are one
        torch.testing.assert_close(found.got, found.wanted, rtol=2e-6, atol=2e-6)
    else:
        assert found.equal()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_they_are_one_pass_in_the_kernel(dtype):
    found = planned(rotated(norm, assigned), dtype, kernel=rowwise.triton)
    assert len(found.passes) == 1
    torch.testing.assert_close(found.got, found.wanted, rtol=2e-3 if dtype is torch.float16 else 3e-6, atol=1e-3)


def normed_again(x, cos, sin, w, wide):
    """Each head is normed by itself, too."""
    q = norm(F.linear(x, wide), w).unflatten(-1, (H, D))
    q = assigned(F.layer_norm(q, (D,)), cos, sin).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q)


def taken_twice(x, cos, sin, w, wide):
    """What is normed goes into a product of its own, so it lies in memory anyway."""
    q = norm(F.linear(x, wide), w)
    turned = assigned(q.unflatten(-1, (H, D)), cos, sin).transpose(1, 2)
    return F.scaled_dot_product_attention(turned, turned, turned), F.linear(q, wide)


def put_together(x, cos, sin, w, wide):
    """By a concatenation of tokens, into which passes over heads write."""
    q = norm(F.linear(x, wide), w).unflatten(-1, (H, D))
    q = torch.cat([q[:, :2] * 1, assigned(q, cos, sin)], dim=1).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("forward", "passes"),
    [(rotated(norm, halves), 2), (normed_again, 2), (taken_twice, 2), (put_together, 2)],
    ids=["halves", "normed again", "taken twice", "put together"],
)
def test_others_are_two(forward, passes, dtype):
    found = planned(forward, dtype)
    assert len(found.passes) >= passes and found.equal()
    assert any(one.program.width == D for one in found.passes)
