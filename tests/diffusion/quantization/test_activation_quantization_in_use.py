"""What users do with denoisers whose rows are rounded: on and off, adapters, offloading, verify, whole pipelines."""

import copy

import pytest
import torch
from accel_kernels import int8_linear

import accel
from accel.quantization.activations import RowProducts
from accel.quantization.module import QuantizedLinear
from accel.verification import rounded_products as judging
from support.diffusion.outputs import close, error, run
from support.diffusion.rounded_rows import EXACT, INT8, options, oracle
from support.llm.quantized import held_by


def test_on_and_off_where_the_originals_were_not_kept(unet_and_inputs):
    model, inputs = unet_and_inputs("sd15")
    plain = accel.optimize(copy.deepcopy(model), weights="int8", graphs=False)
    accel.optimize(model, keep_original=False, **INT8)
    with_rows = run(model, inputs)
    with pytest.warns(UserWarning, match="weights stay quantized"):
        accel.restore(model)
    assert {module.activations for module in held_by(model)} == {None}
    accel.optimize(model)
    close(run(model, inputs), run(plain, inputs), EXACT)
    accel.optimize(model, activations="int8")
    close(run(model, inputs), with_rows, 1e-5)  # its numbers may fall to the other side of a half
    assert error(run(model, inputs), run(plain, inputs)) > 1e-4
    quality = accel.verify(model, **inputs)
    assert quality.passed and quality.lossy == "activations='int8'" and "rounded rows" in quality.parts
    accel.restore(model)
    assert {module.activations for module in held_by(model)} == {None}


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
