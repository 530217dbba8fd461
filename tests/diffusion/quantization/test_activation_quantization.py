"""Denoisers whose rows are rounded to 8 bits: against stock code with inputs rounded by the formula, in float64."""

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
from support.llm.quantized import by_token, held_by, rounded

KINDS = ("int8", "int8-outliers", "fp8")
FAMILIES = ("sd15", "sd21", "sdxl", "only-cross")
INT8 = {"weights": "int8", "activations": "int8"}


def options(kind: str) -> dict:
    return {"weights": kind.partition("-")[0], "activations": kind}


def double(inputs: dict) -> dict:
    return torch.utils._pytree.tree_map(
        lambda t: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t, inputs
    )


@torch.no_grad()
def run(model, inputs):
    return model(**inputs).sample


def close(got, wanted, share=1e-9):
    torch.testing.assert_close(got, wanted, rtol=0, atol=share * float(wanted.abs().max()))


def error(output, truth) -> float:
    return float((output - truth).norm() / truth.norm())


def rows(model):
    return {path: (status, reason) for path, name, status, reason in accel.report(model).sites if name == "activations"}


def oracle(stock, ours):
    """A copy of stock over the weights of ours, with the inputs rounded of those linears that the report names."""
    twin = rounded(stock, ours)
    for row in accel.report(ours).weights:
        held = ours.get_submodule(row["path"]).quantized
        twin.get_submodule(row["path"]).weight.data = held.numbers().double() * held.scales.double()
    for path, (status, reason) in rows(ours).items():
        if path and status == "patched":
            kind = reason.split("activations ")[1].split()[0]
            twin.get_submodule(path).register_forward_pre_hook(
                lambda module, args, kind=kind: (by_token(args[0], kind), *args[1:])
            )
    return twin


@pytest.fixture
def unet(tiny):
    """Maker of a UNet of a family, all of whose linears can be multiplied in 8 bits, and of its inputs."""

    def make(family="sd15", dtype=torch.float64):
        sizes = {"block_out_channels": (16, 32), "cross_attention_dim": 16}
        model = tiny.unet(family, **sizes).to(dtype)
        inputs = tiny.inputs(model, height=16, width=18)
        return model, double(inputs) if dtype == torch.float64 else inputs

    return make


@pytest.fixture
def in_double(monkeypatch):
    """in_double(): from now on everything is float64; what is float32 otherwise puts numbers next to a half to the
    other side.
    """

    def enter():
        monkeypatch.setattr(torch, "float32", torch.float64)
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)

    return enter


@pytest.mark.parametrize(("family", "kind"), [(f, KINDS[i % 3]) for i, f in enumerate(FAMILIES)] + [("sd15", "fp8")])
@pytest.mark.share(2)
def test_a_unet_computes_the_formula(family, kind, unet, tiny, in_double):
    stock, inputs = unet(family)
    for module in stock.modules():  # channels of large values behind a norm
        if type(module) is nn.LayerNorm:
            module.weight.data[5] *= 10
    ours = copy.deepcopy(stock)
    before = tiny.snapshot(ours)
    in_double()
    accel.optimize(ours, **options(kind))
    twin, plain = oracle(stock, ours), rounded(stock, ours)
    close(run(ours, inputs), run(twin, inputs))
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
    close(run(ours, inputs), run(twin, inputs))
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


def test_what_is_rounded_and_fused(unet):
    """Queries, keys and values round once; the norm is inside; gate, residuals and biases are in the product."""
    model, inputs = unet("sdxl", torch.float32)
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


def test_the_report_tells_which_linears_round(unet):
    model, _ = unet("sdxl", torch.float32)
    accel.optimize(model, **INT8)
    found = rows(model)
    prompt = [row["path"] for row in accel.report(model).weights if row["scheme"] == "int8 by row"]
    assert len(prompt) == 16 and all("attn2.to_k" in path or "attn2.to_v" in path for path in prompt)
    both = "int8 by row, activations int8 beyond 64 rows"
    assert {row["scheme"] for row in accel.report(model).weights if row["path"] not in prompt} == {both}
    assert {reason for path, (_, reason) in found.items() if path} == {both} and not set(prompt) & set(found)
    count = len(held_by(model)) - len(prompt)
    told = f"{count} linears round rows, where there are more than 64; 16 that project the prompt, once a loop, do not"
    assert found[""] == ("patched", told) and len(found) == count + 1
    assert "activations int8 beyond" in " ".join(str(accel.report(model)).split())
    odd = accel.optimize(transformer("pixart"), **INT8)
    left = {path: reason for path, (status, reason) in rows(odd).items() if status == "skipped"}
    assert left == {"caption_projection.linear_1": "24 inputs, not a multiple of 16"}
    assert odd.caption_projection.linear_1.activations is None
    with pytest.raises(ValueError, match=r"strict=True: caption_projection.linear_1 \(activations\): 24 inputs"):
        accel.optimize(transformer("pixart"), strict=True, graphs=False, **INT8)
    accel.optimize(unet("sd15", torch.float32)[0], strict=True, **INT8)


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
def test_what_cannot_be_is_refused(chosen, dtype, told, unet, tiny):
    model, _ = unet("sd15", dtype)
    before = tiny.snapshot(model)
    with pytest.raises(ValueError, match=told):
        accel.optimize(model, **chosen)
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_a_vae_has_no_rows_to_round(tiny):
    with pytest.raises(ValueError, match="activations='int8': for .* and denoisers, such as UNets; a AutoencoderKL"):
        accel.optimize(tiny.vae(), activations="int8")


def test_on_and_off_where_the_originals_were_not_kept(unet):
    model, inputs = unet("sd15")
    plain = accel.optimize(copy.deepcopy(model), weights="int8", graphs=False)
    accel.optimize(model, keep_original=False, **INT8)
    with_rows = run(model, inputs)
    with pytest.warns(UserWarning, match="linear layers stay quantized"):
        accel.restore(model)
    assert {module.activations for module in held_by(model)} == {None}
    accel.optimize(model)
    close(run(model, inputs), run(plain, inputs))
    accel.optimize(model, activations="int8")
    close(run(model, inputs), with_rows, 1e-5)  # its numbers may fall to the other side of a half
    assert error(run(model, inputs), run(plain, inputs)) > 1e-4
    quality = accel.verify(model, **inputs)
    assert quality.passed and quality.lossy == "activations='int8'" and "rounded rows" in quality.parts
    accel.restore(model)
    assert {module.activations for module in held_by(model)} == {None}


def test_lora_on_top(unet, in_double):
    peft = pytest.importorskip("peft")
    stock, inputs = unet("sdxl")
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
    close(run(model, inputs), run(twin, inputs))
    for one in (model, twin):
        one.delete_adapters("default")
    assert error(run(model, inputs), plain) > 1e-3
    close(run(model, inputs), run(twin, inputs))
    accel.restore(model)
    assert torch.equal(run(model, inputs), run(stock, inputs))


def test_offloaded_afterwards(unet):
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    stock, inputs = unet("sd15")
    model = accel.optimize(copy.deepcopy(stock), **INT8)
    wanted = run(model, inputs)
    cpu_offload(model, execution_device=torch.device("cpu"))
    close(run(model, inputs), wanted, 1e-5)
    remove_hook_from_submodules(model)
    accel.restore(model)
    assert torch.equal(run(model, inputs), run(stock, inputs))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("int8", torch.float16), ("int8", torch.bfloat16), ("int8-outliers", torch.float16), ("fp8", torch.bfloat16)],
    ids=str,
)
def test_verify_tells_the_loss_and_judges_products(kind, dtype, unet):
    model, inputs = unet("sdxl", dtype)
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


# docs/measurements/quantization.md says so.
@pytest.mark.parametrize(("kind", "told"), [("int8", 48.4), ("int8-outliers", 49.3), ("fp8", 38.7)])
@pytest.mark.share(3)
def test_digits_stay_the_same(kind, told, pipe, digits, ten_digits, stock_digits):
    from diffusers.image_processor import VaeImageProcessor

    accel.optimize(pipe, **options(kind))
    ours = ten_digits(pipe)
    assert float(-10 * (ours - stock_digits()).square().mean().log10()) == pytest.approx(told, abs=1.5)
    images = VaeImageProcessor.numpy_to_pil(ours.permute(0, 2, 3, 1).numpy())
    assert sum(a == b for a, b in zip(digits.read_digits(images), range(10), strict=True)) >= 9
    accel.restore(pipe)
    assert torch.equal(ten_digits(pipe, 2), stock_digits(2))


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
