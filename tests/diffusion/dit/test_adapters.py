"""Adapters and quantized weights in diffusion transformers."""

import copy

import pytest
import torch

import accel
from accel.bench.adapters import put_adapters_on
from accel.diffusion.dit.block import BlockForward
from accel.diffusion.dit.executable import Executable
from accel.diffusion.dit.lowering import Pass
from accel.quantization.activations import RowProducts
from benchmarks.models.tiny_denoisers import DITS, given, transformer
from support.compatibility.diffusers_calls import inputs
from support.compatibility.tiny_diffusers_models import build
from support.compatibility.transformer_pair import FLUX, ROUNDING, SD3, WAN, alike, first
from support.diffusion.library_formats import FORMATS, READ, quantized
from support.diffusion.outputs import in_dtype
from support.noted import call_counts

peft = pytest.importorskip("peft")

BLOCK = "diffusion transformer block"
TARGETS = ["to_q", "to_k", "to_out.0", "proj_mlp"]


def adapter(**more):
    return peft.LoraConfig(**{"r": 2, "lora_alpha": 4, "target_modules": TARGETS, "init_lora_weights": False} | more)


def shows(one, other):
    assert float((one - other).abs().max()) > 1e-4


@pytest.mark.parametrize("pair", [FLUX, SD3, WAN], indirect=True)
@pytest.mark.turns(2)
def test_loras_are_fused_with_the_block_they_are_in(pair):
    plain = pair.agree()
    pair.change(lambda m: m.add_adapter(adapter(), adapter_name="style"))
    styled = pair.agree()
    shows(styled, plain)
    assert torch.equal(pair.agree(), styled) or pair.name == WAN
    pair.change(lambda m: m.add_adapter(adapter(r=3), adapter_name="detail"))
    pair.change(lambda m: m.set_adapters(["style", "detail"], [0.3, 0.8]))
    both = pair.agree()
    shows(both, styled)
    pair.change(lambda m: m.set_adapters(["style"], [0.9]))
    shows(pair.agree(), both)
    kwargs = "attention_kwargs" if pair.name == WAN else "joint_attention_kwargs"
    for scale in (0.5, 0.25):
        shows(pair.agree(**{kwargs: {"scale": scale}}), both)
    before = pair.agree()
    pair.change(lambda m: m.disable_adapters())
    shows(pair.agree(), before)
    pair.change(lambda m: m.enable_adapters())
    pair.change(lambda m: m.fuse_lora(lora_scale=0.7))
    shows(pair.agree(), before)
    pair.change(lambda m: m.unfuse_lora())
    pair.change(lambda m: m.delete_adapters("style"))
    shows(pair.agree(), before)
    pair.change(lambda m: m.unload_lora())
    torch.testing.assert_close(pair.agree(), plain, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", DITS)
def test_linears_of_several_adapters_do_not_make_a_block(name):
    def blocks():
        return [site[0] for site in accel.report(accel.optimize(model)).sites if site[1] == BLOCK]

    model = transformer(name)
    plain = blocks()
    accel.restore(model)
    put_adapters_on(model, 3, 2)
    stock = copy.deepcopy(model)
    assert blocks() == plain
    for _ in range(2):
        alike(first(model(**given(name))), first(stock(**given(name))), 1e-5)
    assert not accel.report(model).fallbacks


def weights(model, seed):
    generator = torch.Generator().manual_seed(seed)
    state = peft.get_peft_model_state_dict(model, adapter_name="default")
    return {f"transformer.{name}": torch.randn(one.shape, generator=generator) / 4 for name, one in state.items()}


@pytest.mark.parametrize("pair", [FLUX], indirect=True)
@pytest.mark.parametrize("scaled", [False, True])
def test_a_lora_in_the_place_of_another(pair, scaled):
    """As loaded from a file, and swapped for one of another rank; scales are tensors then."""
    from diffusers import FluxTransformer2DModel
    from peft.utils.hotswap import prepare_model_for_compiled_hotswap

    config = FluxTransformer2DModel.from_config(pair.stock.config)
    states = []
    for seed in (1, 2):
        config.add_adapter(adapter(), adapter_name="default")
        states.append(weights(config, seed))
        config.delete_adapters("default")

    def load(model, state, **how):
        given = {name: one.clone() for name, one in state.items()}  # PEFT 0.18 leaves the weights of before in them
        model.load_lora_adapter(given, adapter_name="default", **how)

    if scaled:
        pair.change(lambda m: m.enable_lora_hotswap(target_rank=4))
    pair.change(lambda m: load(m, states[0]))
    before = pair.agree()
    pair.change(lambda m: load(m, states[1], hotswap=True))
    after = pair.agree()
    shows(after, before)
    if not scaled:  # scales become tensors, of the same number
        pair.change(lambda m: prepare_model_for_compiled_hotswap(m, target_rank=2))
        shows(pair.agree(), before)
    if scaled:
        pair.change(lambda m: pair.block(m).attn.to_q.scaling["default"].mul_(3))
        shows(pair.agree(), after)


@pytest.mark.parametrize("pair", [FLUX, SD3], indirect=True)
def test_an_adapter_that_draws_random_numbers_runs_stock(pair):
    pair.agree()
    pair.change(lambda m: m.add_adapter(adapter(lora_dropout=0.5)))
    said = "training mode inside"
    block = pair.block(pair.ours)
    with torch.no_grad():
        pair.ours(**pair.inputs)
    assert any(said in reason for _, reason, _ in pair.report().fallbacks)
    pair.change(lambda m: m.eval())
    pair.agree()
    assert not block.training


@pytest.mark.parametrize("pair", [FLUX, SD3], indirect=True)
def test_dora_as_stock_has_it(pair):
    pair.agree()
    pair.change(lambda m: m.add_adapter(adapter(use_dora=True)))
    pair.change(lambda m: m.eval())
    pair.agree()


class Given(torch.nn.Module):
    """Image embeddings as the blocks take them."""

    def forward(self, embeddings):
        return embeddings


@pytest.mark.parametrize("pair", [FLUX], indirect=True)
def test_an_image_adapter_is_fused_and_its_scales_are_changed_in_place(pair):
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    plain = pair.agree()
    before = [pair.block(model).attn.processor for model in (pair.ours, pair.stock)]

    def adapt(model):
        pair.block(model).attn.set_processor(FluxIPAdapterAttnProcessor(32, 24, scale=0.7))
        model.encoder_hid_proj = Given()

    pair.change(adapt)
    embeddings = torch.randn(2, 5, 24)
    seen = [plain]
    for scale in (0.7, 0.2):
        for model in (pair.ours, pair.stock):
            pair.block(model).attn.processor.scale[0] = scale
        for _ in range(2):
            # the model takes the embeddings out of the dictionary that it is given
            kwargs = [{"ip_adapter_image_embeds": [embeddings]} for _ in range(2)]
            ran = pair.plans
            with torch.no_grad():
                ours, stock = (
                    model(**pair.inputs, joint_attention_kwargs=one).sample
                    for model, one in zip((pair.ours, pair.stock), kwargs, strict=True)
                )
            assert torch.equal(ours, stock) and pair.plans - ran == pair.blocks
        shows(ours, seen[-1])
        seen.append(ours)
    assert pair.report().fallbacks == []
    for model, processor in zip((pair.ours, pair.stock), before, strict=True):
        pair.block(model).attn.set_processor(processor)
    assert torch.equal(pair.agree(), plain)


QWEN, PIXART, Z_IMAGE = "QwenImageTransformer2DModel", "PixArtTransformer2DModel", "ZImageTransformer2DModel"
CLASSES = (FLUX, SD3, WAN, QWEN, PIXART, Z_IMAGE)
WAYS = [("int8", None), ("fp8", None), ("int8", "int8"), ("fp8", "fp8")]


class QuantizedPair:
    """ours: planned; unfused: of the same quantized weights. runs: how often plans ran, and linears rounded rows."""

    def __init__(self, name, weights, activations, monkeypatch):
        model = transformer(name) if name in DITS else build(name)
        self.inputs = in_dtype(given(name) if name in DITS else inputs(model), torch.bfloat16)
        options = {"weights": weights, "activations": activations}
        self.stock = model.bfloat16()
        self.unfused = accel.optimize(copy.deepcopy(model), **options)
        for module in self.unfused.modules():
            vars(module).pop("forward", None)
        self.ours = accel.optimize(copy.deepcopy(model), **options, cpu="fuse")
        counted = {"plans": (Executable, "__call__"), "rounded": (RowProducts, "rounded")}
        self.runs = call_counts(monkeypatch, counted)

    @torch.no_grad()
    def call(self, model):
        self.runs.clear()
        output = first(model(**self.inputs))
        return torch.cat(output) if isinstance(output, list) else output

    @property
    def forwards(self):
        found = (vars(module).get("forward") for module in self.ours.modules())
        return [forward for forward in found if isinstance(forward, BlockForward)]

    def units(self, forward):
        return [unit for plan in forward.known.values() for unit in plan.executable.units]


def calls(units):
    return [unit.step.name for unit in units if hasattr(unit, "step")]


@pytest.fixture
def quantized_pair(monkeypatch):
    """Maker of one, in which rows of tens of tokens are many."""
    monkeypatch.setattr("accel.quantization.activations.MOST_ROWS", 4)
    return lambda name, weights, activations=None: QuantizedPair(name, weights, activations, monkeypatch)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(("weights", "activations"), WAYS)
def test_quantized_blocks_run_from_plans(name, weights, activations, quantized_pair):
    both = quantized_pair(name, weights, activations)
    wanted = both.call(both.unfused)
    assert both.runs["plans"] == 0 and bool(both.runs["rounded"]) == (activations is not None)
    both.call(both.ours)  # recorded
    got = both.call(both.ours)
    blocks = both.forwards
    assert both.runs["plans"] == len(blocks) > 0 and accel.report(both.ours).fallbacks == []
    assert both.runs["rounded"] == 0  # by itself: what is in no block stays in 16 bits
    assert torch.equal(got, wanted)
    plans = [plan for block in blocks for plan in block.known.values()]
    assert all(plan.compared for plan in plans)
    accel.restore(both.ours)
    alike(both.call(both.ours), both.call(both.stock))


def test_rows_are_rounded_once_in_the_pass_that_makes_them(quantized_pair):
    """Flux: a norm's result for three products, GELU's for one, an attention's in a pass of its own."""
    both = quantized_pair(FLUX, "int8", "int8")
    both.call(both.ours)
    double, single = both.forwards
    for forward, rounded, products in ((double, 8, 12), (single, 4, 5)):
        units = both.units(forward)
        passes = [[op.name for op in unit.program.ops] for unit in units if isinstance(unit, Pass)]
        assert sum("numbers_int8" in ops for ops in passes) == rounded
        assert (
            sum(getattr(one, "step", None) is not None and one.step.name == "rounded_product" for one in units)
            == products
        )
        assert sum("gelu_tanh" in ops and "numbers_int8" in ops for ops in passes) == (2 if forward is double else 1)
    assert not {"cat", "gelu"} & set(calls(both.units(single)))  # columns for a product: piece by piece


def test_the_plan_is_compared_with_the_quantized_block(quantized_pair, monkeypatch):
    both = quantized_pair(SD3, "int8", "int8")
    wanted = both.call(both.unfused)
    from accel_kernels.rowwise import rowwise

    monkeypatch.setitem(rowwise.TORCH, "numbers_int8", lambda x, peak: (x / peak * 64).round())
    both.call(both.ours)
    assert torch.equal(both.call(both.ours), wanted) and both.runs["plans"] == 0
    reasons = {reason for _, reason, _ in accel.report(both.ours).fallbacks}
    assert len(reasons) == 1 and reasons.pop().startswith("computes something else")


def test_blocks_of_one_kind_share_a_plan_and_copies_make_their_own(quantized_pair):
    both = quantized_pair("pixart", "fp8", "fp8")
    got = both.call(both.ours)
    one, other = both.forwards
    assert one.known is other.known
    both.ours = copy.deepcopy(both.ours)
    both.call(both.ours)
    assert torch.equal(both.call(both.ours), got) and both.runs["plans"] == 2
    assert both.runs["rounded"] == 0


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("pair", [FLUX], indirect=True)
def test_formats_of_other_libraries_are_called_inside_of_fused_blocks(format, pair, monkeypatch):
    plain = pair.agree()
    if format in READ:  # it rounds its products, and then scales them; read as it lies the weight is rounded
        monkeypatch.setitem(ROUNDING, FLUX, 2**-6)
    pair.inputs = in_dtype(pair.inputs, torch.bfloat16)
    pair.change(lambda model: quantized(model, format, torch.bfloat16))
    pair.agree(fast=None)  # some set what they compute in at their first call
    got = pair.agree()
    assert float((got.float() - plain).abs().max()) > 0
    assert torch.equal(pair.agree(), got)
