"""Activations rounded to int8, and pipelines in which they are."""

import copy

import pytest
import torch
from accel_kernels import int8_linear
from torch import nn

import accel
from accel.quantization.activations import RowProducts
from accel.quantization.module import QuantizedLinear
from accel.verification import rounded_products as judging
from support.diffusion.denoisers import DITS, given, transformer
from support.diffusion.outputs import close, error, run
from support.diffusion.rounded_rows import EXACT, INT8, double, options, oracle
from support.llm.quantized import held_by, rounded
from support.patched import sites

KINDS = ("int8", "int8-outliers", "fp8")
FAMILIES = ("sd15", "sd21", "sdxl", "only-cross")


@pytest.mark.parametrize(("family", "kind"), [(f, KINDS[i % 3]) for i, f in enumerate(FAMILIES)] + [("sd15", "fp8")])
@pytest.mark.share(2)
def test_a_unet_computes_the_formula(family, kind, unet_and_inputs, tiny, in_double):
    stock, inputs = unet_and_inputs(family)
    for module in stock.modules():  # channels of large values behind a norm
        if type(module) is nn.LayerNorm:
            module.weight.data[5] *= 10
    ours = copy.deepcopy(stock)
    before = tiny.snapshot(ours)
    in_double()
    accel.optimize(ours, **options(kind))
    twin, plain = oracle(stock, ours), rounded(stock, ours)
    close(run(ours, inputs), run(twin, inputs), EXACT)
    assert error(run(ours, inputs), run(plain, inputs)) > 1e-4  # or nothing was rounded
    assert accel.report(ours).fallbacks == []
    accel.restore(ours)
    tiny.assert_same_state(before, tiny.snapshot(ours))
    assert torch.equal(run(ours, inputs), run(stock, inputs))


@pytest.mark.parametrize("name", DITS)
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_transformer_computes_the_formula(name, kind, in_double):
    stock, inputs = transformer(name).double(), double(given(name, times=4))
    ours = accel.optimize(copy.deepcopy(stock), **options(kind))
    twin, plain = oracle(stock, ours), rounded(stock, ours)
    in_double()
    close(run(ours, inputs), run(twin, inputs), EXACT)
    assert error(run(ours, inputs), run(plain, inputs)) > 1e-4
    accel.restore(ours)
    assert torch.equal(run(ours, inputs), run(stock, inputs))


class Counting(RowProducts):
    """Counts what is rounded, and what it is multiplied with."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "rows", [])
        object.__setattr__(self, "given", [])

    def rounded(self, x, activations, norm=None, fixed=None):
        self.rows.append((tuple(x.shape), norm is not None))
        return super().rounded(x, activations, norm, fixed)

    def product(self, activations):
        def counted(x, weight, bias, **after):
            self.given.append((weight.shape[0], {name for name, value in after.items() if value is not None}))
            return RowProducts.product(self, activations)(x, weight, bias, **after)

        return counted


def test_what_is_rounded_and_fused(unet_and_inputs):
    """Queries, keys and values round once; the norm is inside; gate, residuals and biases are in the product."""
    model, inputs = unet_and_inputs("sdxl", torch.float32)
    accel.optimize(model, **INT8)
    counting = Counting()
    for module in held_by(model):
        module.products = counting
    run(model, inputs)
    block = [(32, True), (32, False), (32, True), (32, False), (32, True), (128, False)]
    stack = [(32, False), *block, *block, (32, False)]  # projections into and out of it
    assert {shape for shape, _ in counting.rows} == {(2, 72, 32), (2, 72, 128)} and len(counting.rows) == 4 * len(stack)
    assert [(shape[-1], norm) for shape, norm in counting.rows] == 4 * stack
    products = [(96, set()), (32, {"residual"}), (32, set()), (32, {"residual"}),
                (128, {"up", "up_bias", "activation"}), (32, {"residual"})]  # fmt: skip
    assert counting.given == 4 * [(32, set()), *products, *products, (32, set())]


def test_the_report_tells_which_linears_round(unet_and_inputs):
    model, _ = unet_and_inputs("sdxl", torch.float32)
    accel.optimize(model, **INT8)
    found = sites(model, "activations")
    prompt = [row["path"] for row in accel.report(model).weights if row["scheme"] == "int8 by row"]
    assert len(prompt) == 16 and all("attn2.to_k" in path or "attn2.to_v" in path for path in prompt)
    both = "int8 by row, activations int8 beyond 64 rows"
    assert {row["scheme"] for row in accel.report(model).weights if row["path"] not in prompt} == {both}
    assert {reason for path, (_, reason) in found.items() if path} == {both} and not set(prompt) & set(found)
    count = len(held_by(model)) - len(prompt)
    told = f"{count} linears round rows, where there are more than 64; 16 that project the prompt, once a loop, do not"
    assert found[""] == ("patched", told) and len(found) == count + 1
    assert "activations int8 beyond" in " ".join(str(accel.report(model)).split())
    sizes = {"attention_head_dim": 12, "cross_attention_dim": 24}
    odd = accel.optimize(transformer("pixart", **sizes), **INT8)
    left = {path: reason for path, (status, reason) in sites(odd, "activations").items() if status == "skipped"}
    assert set(left.values()) == {"24 inputs, not a multiple of 16"}
    assert odd.transformer_blocks[0].ff.net[0].proj.activations is None
    assert odd.transformer_blocks[0].ff.net[2].activations == "int8"
    with pytest.raises(ValueError, match=r"strict=True: transformer_blocks.0.attn1.to_q \(activations\): 24 inputs"):
        accel.optimize(transformer("pixart", **sizes), strict=True, graphs=False, **INT8)
    accel.optimize(unet_and_inputs("sd15", torch.float32)[0], strict=True, **INT8)


@pytest.mark.parametrize(
    ("chosen", "dtype", "told"),
    [
        ({"activations": "int8"}, torch.float32, "and the UNet2DConditionModel holds none: give weights='int8' too"),
        ({"weights": "int8-asym", "activations": "int8"}, torch.float32, "needs weights='int8', not 'int8-asym'"),
        (
            {"activations": "fp8-static"},
            torch.float32,
            "for causal language models; a UNet2DConditionModel takes 'fp8'",
        ),
        (
            {"weights": "fp8", "activations": "fp8"},
            torch.float16,
            "is in float16; load it in bfloat16, or",
        ),
    ],
)
def test_what_cannot_be_is_refused(chosen, dtype, told, unet_and_inputs, tiny):
    model, _ = unet_and_inputs("sd15", dtype)
    before = tiny.snapshot(model)
    with pytest.raises(ValueError, match=told):
        accel.optimize(model, **chosen)
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_a_vae_has_no_rows_to_round(tiny):
    with pytest.raises(ValueError, match="activations='int8': for .* and denoisers, such as UNets; a AutoencoderKL"):
        accel.optimize(tiny.vae(), activations="int8")


def test_lora_on_top(unet_and_inputs, in_double):
    peft = pytest.importorskip("peft")
    stock, inputs = unet_and_inputs("sdxl")
    model = accel.optimize(copy.deepcopy(stock), **INT8)
    twin = oracle(stock, model)
    targets = ["to_q", "to_out.0", "ff.net.0.proj"]
    for one in (model, twin):
        torch.manual_seed(5)
        one.add_adapter(peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
        one.double()
    for path, module in twin.named_modules():  # the base alone sees rounded rows; its hook went with it
        assert not path.endswith("base_layer") or module._forward_pre_hooks
    plain = run(model, inputs)
    in_double()
    close(run(model, inputs), run(twin, inputs), EXACT)
    for one in (model, twin):
        one.delete_adapters("default")
    assert error(run(model, inputs), plain) > 1e-3
    close(run(model, inputs), run(twin, inputs), EXACT)
    accel.restore(model)
    assert torch.equal(run(model, inputs), run(stock, inputs))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("int8", torch.float16), ("int8", torch.bfloat16), ("int8-outliers", torch.float16), ("fp8", torch.bfloat16)],
    ids=str,
)
@pytest.mark.share(2)
def test_verify_tells_the_loss_and_judges_products(kind, dtype, unet_and_inputs):
    model, inputs = unet_and_inputs("sdxl", dtype)
    inputs = torch.utils._pytree.tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)
    accel.optimize(model, **options(kind))
    quality = accel.verify(model, **inputs)
    assert quality.passed, quality.verdict
    assert quality.lossy == f"weights={options(kind)['weights']!r}, activations={kind!r}"
    assert set(quality.parts) == {"over the same weights", "rounded rows", "their products"}
    assert "without rounding rows" in quality.note and quality.parts["rounded rows"].error > 0.3
    few = torch.utils._pytree.tree_map(lambda t: t[:1] if t.dim() else t, inputs)
    few = accel.verify(model, **few | {"sample": few["sample"][:, :, :8, :8]})
    assert few.passed and "too few in this call" in few.note


def test_verify_of_a_pipeline(pipe, monkeypatch):
    accel.optimize(pipe, **INT8)
    quality = accel.verify(pipe, "a handwritten seven", num_inference_steps=4)
    assert quality.passed and quality.verdict.startswith("lossy, as asked for (weights='int8', activations='int8')")
    assert {"unet", "unet: rounded rows", "unet: their products"} < set(quality.parts)
    assert quality.parts["unet"].lossy is None and quality.psnr_db < 55

    def off(*given, **more):
        return 1.01 * int8_linear(*given, **more)

    monkeypatch.setattr(judging, "KERNELS", RowProducts(int8_linear=off))
    failed = accel.verify(pipe, "a handwritten seven", num_inference_steps=4)
    assert failed.verdict.startswith("FAILED: unet: their products: ")
    assert type(pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_q) is QuantizedLinear
