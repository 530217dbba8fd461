"""Denoisers with weights in 8 bits, against stock over the same weights: outputs, what is fused, undo, adapters."""

import copy
import json
import pickle

import pytest
import torch
from torch import nn

import accel
from accel.bench import configs
from accel.diffusion.linears import denoises
from accel.errors import PatchConflict
from accel.fusion import stacked_linears as joint
from accel.planning.plan import PLAN
from accel.quantization import product
from accel.quantization.module import QuantizedLinear
from support.diffusion.denoisers import DITS, given, transformer
from support.llm.quantized import held_by, rounded

WEIGHTS = ("int8", "int8-asym", "fp8")
FUSED = ("resnet block", "transformer stack", "transformer block", "attention", "upward block", "layer norm")


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs).sample


def close(got, wanted, share=1e-5):
    torch.testing.assert_close(got, wanted, rtol=0, atol=share * float(wanted.abs().max()))


def error(output, truth) -> float:
    return float((output.float() - truth.float()).norm() / truth.float().norm())


def rows(model, rule="weights"):
    return {path: (status, reason) for path, name, status, reason in accel.report(model).sites if name == rule}


FAMILIES = ("sd15", "sd21", "sdxl", "scale-shift", "only-cross", "inpainting", "scaled", "resample-in-resnet")


@pytest.fixture(params=FAMILIES)
def family(request, tiny):
    assert set(FAMILIES) == set(tiny.families)
    return request.param


@pytest.fixture
def unet(tiny):
    """Maker of a UNet of a family, whose prompt is wide enough for weights in 8 bits."""
    return lambda family="sd15": tiny.unet(family, cross_attention_dim=16)


@pytest.mark.share(2)
def test_a_unet_equals_stock_over_the_same_weights(family, tiny, unet):
    model, weights = unet(family), WEIGHTS[FAMILIES.index(family) % 3]
    stock, inputs = copy.deepcopy(model), tiny.inputs(model)
    before = tiny.snapshot(model)
    accel.optimize(model, weights=weights)
    twin = rounded(stock, model)
    close(run(model, inputs), run(twin, inputs))
    assert 1e-5 < error(run(model, inputs), run(stock, inputs)) < (0.05 if weights == "fp8" else 0.01)
    assert accel.report(model).fallbacks == []
    accel.restore(model)
    tiny.assert_same_state(before, tiny.snapshot(model))
    assert torch.equal(run(model, inputs), run(stock, inputs))


@pytest.mark.parametrize("name", DITS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_transformer_equals_stock_over_the_same_weights(name, weights, tiny):
    model, inputs = transformer(name), given(name)
    stock, before = copy.deepcopy(model), tiny.snapshot(model)
    accel.optimize(model, weights=weights)
    close(run(model, inputs), run(rounded(stock, model), inputs))
    assert 1e-5 < error(run(model, inputs), run(stock, inputs)) < (0.05 if weights == "fp8" else 0.02)
    left = [path for path, module in model.named_modules() if type(module) is nn.Linear]
    assert left and all("." not in path for path in left)  # what reads and writes latents
    assert accel.report(model).fallbacks == []
    accel.restore(model)
    tiny.assert_same_state(before, tiny.snapshot(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_in_half_precision_as_near_to_the_truth_as_stock(name, dtype, tiny, unet):
    stock = unet(name).to(dtype)
    model = accel.optimize(copy.deepcopy(stock), weights="int8")
    twin, truth, inputs = rounded(stock, model), rounded(stock, model, torch.float32), tiny.inputs(stock)

    def cast(kind):
        return torch.utils._pytree.tree_map(lambda t: t.to(kind) if t.is_floating_point() else t, inputs)

    wanted = run(truth, cast(torch.float32))
    assert error(run(model, cast(dtype)), wanted) <= 2 * error(run(twin, cast(dtype)), wanted)
    assert accel.verify(model).passed


def test_everything_that_is_fused_takes_quantized_linears(family, unet):
    plain, model = accel.optimize(unet(family)), accel.optimize(unet(family), weights="int8")
    assert {rule: rows(model, rule) for rule in FUSED} == {rule: rows(plain, rule) for rule in FUSED}


def test_one_product_for_projections_of_one_input(tiny, unet, monkeypatch):
    model = accel.optimize(unet("sd15"), weights="int8")
    inputs = tiny.inputs(model, height=16, width=16)
    products = []

    def counted(x, weight, *rest):
        products.append((x.shape, weight.shape))
        return product.multiplied(x, weight, *rest)

    monkeypatch.setattr(joint, "multiplied", counted)
    run(model, inputs)
    assert ((2, 256, 16), (48, 16)) in products  # queries, keys and values
    assert sum(shape == (2, 64) for shape, _ in products) == 1  # all time embeddings
    assert sum(len(shape) == 3 and shape[1] == 7 for shape, _ in products) == 1  # the prompt's keys and values
    assert len([row for row in accel.report(model).weights if ".attn2.to_k" in row["path"]]) > 2


def test_the_report_tells_what_became_of_the_bytes(unet):
    model = unet("sdxl")
    before = sum(p.nbytes for p in model.parameters())
    accel.optimize(model, weights="int8")
    report = accel.report(model)
    held = sum(t.nbytes for module in held_by(model) for t in module.buffers())
    now = sum(p.nbytes for p in model.parameters()) + held
    status, told = rows(model)[""]
    assert status == "patched" and f"{before / 1e6:.1f} MB become {now / 1e6:.1f}" in told and "convolutions, " in told
    assert before - now == sum(row["bytes_before"] - row["bytes_after"] for row in report.weights)
    assert len(report.weights) == len(held_by(model)) == 99 and all(row["sqnr_db"] > 38 for row in report.weights)
    assert "SQNR dB" in str(report) and json.dumps(report.to_dict())


# docs/measurements/quantization.md says so.
@pytest.mark.parametrize(("config", "share"), [(configs.SD15_UNET, 0.84), (configs.SDXL_UNET, 0.57)])
def test_what_published_unets_become(config, share):
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        model = UNet2DConditionModel(**config)
    assert denoises(model)
    total = sum(p.numel() for p in model.parameters())
    linear = [m for path, m in model.named_modules() if type(m) is nn.Linear]
    after = total - sum(m.weight.numel() / 2 - m.out_features for m in linear)
    assert round(after / total, 2) == share


def test_what_takes_no_weights_says_so_and_stays(tiny):
    for model, weights, told in (
        (
            tiny.vae(),
            "int8",
            "for causal language models and denoisers, such as UNets; a AutoencoderKL",
        ),
        (tiny.unet(), "int4", "for causal language models; a UNet2DConditionModel takes 'int8', "),
        (
            tiny.unet(),
            "fp8-head",
            "only causal language models have an output head; a UNet2DConditionModel takes 'int8', ",
        ),
    ):
        before = tiny.snapshot(model)
        with pytest.raises(ValueError, match=f"weights='{weights}': {told}"):
            accel.optimize(model, weights=weights)
        tiny.assert_same_state(before, tiny.snapshot(model))


def test_an_error_leaves_nothing_quantized(tiny, unet, monkeypatch):
    model = unet()
    layer = model.mid_block.attentions[0].transformer_blocks[0].ff.net[2]
    before = tiny.snapshot(model)
    kept = layer.weight.detach().clone()
    layer.weight.data[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"weights='int8': mid_block.attentions.0.*ff.net.2: NaN or Inf"):
        accel.optimize(model, weights="int8")
    layer.weight.data.copy_(kept)
    tiny.assert_same_state(before, tiny.snapshot(model))

    def broken(*given):
        assert held_by(model)
        raise MemoryError

    monkeypatch.setattr(joint.PromptProjections, "shared", broken)
    with pytest.raises(MemoryError):
        accel.optimize(model, weights="int8")
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_what_does_not_fit_is_left_with_a_reason(tiny):
    model = tiny.unet(cross_attention_dim=12)
    accel.optimize(model, weights="int8")
    left = {reason for status, reason in rows(model).values() if status == "skipped"}
    assert left == {"12 inputs, not a multiple of 8"}
    assert type(model.mid_block.attentions[0].transformer_blocks[0].attn2.to_k) is nn.Linear
    inputs = tiny.inputs(model)
    close(run(model, inputs), run(rounded(accel.restore(copy.deepcopy(model)), model), inputs))
    with pytest.raises(ValueError, match=r"strict=True: .*to_k \(weights\): 12 inputs"):
        accel.optimize(tiny.unet(cross_attention_dim=12), weights="int8", strict=True)
    accel.optimize(tiny.unet(cross_attention_dim=16), weights="int8", strict=True)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_quantized_by_itself(copied, tiny, unet):
    model, stock, inputs = unet(), unet(), tiny.inputs(unet())
    accel.optimize(model, weights="fp8")
    wanted = run(model, inputs)
    other = copied(model)
    accel.restore(model)
    assert held_by(other) and not held_by(model)
    close(run(other, inputs), wanted)
    accel.restore(other)
    assert torch.equal(run(other, inputs), run(stock, inputs))


def test_without_the_originals(tiny, unet, tmp_path):
    model, stock, inputs = unet(), unet(), tiny.inputs(unet())
    accel.optimize(model, weights="int8", keep_original=False)
    assert "not reversible" in str(accel.report(model))
    quality = accel.verify(model, **inputs)
    assert quality.passed and "original weights were not kept" in quality.note
    wanted = run(rounded(stock, model), inputs)
    close(run(model, inputs), wanted)
    with pytest.warns(UserWarning, match="linear layers stay quantized"):
        accel.restore(model)
    close(run(model, inputs), wanted)
    accel.optimize(model)  # they are the model's own now, and fused as such
    close(run(model, inputs), wanted)
    assert accel.report(model).fallbacks == [] and "transformer block" in {row[1] for row in accel.report(model).sites}


# -- what users do with it ---------------------------------------------------------------------------------------------


def test_lora_on_top(tiny, unet):
    peft = pytest.importorskip("peft")
    model, inputs = unet("sdxl"), tiny.inputs(unet("sdxl"))
    stock = copy.deepcopy(model)
    accel.optimize(model, weights="int8")
    twin = rounded(stock, model)
    plain = run(model, inputs)
    targets = ["to_q", "to_out.0", "ff.net.0.proj", "conv1", "time_emb_proj"]
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    for one in (model, twin):
        torch.manual_seed(5)
        one.add_adapter(config)
    with_lora = run(model, inputs)
    close(with_lora, run(twin, inputs))
    assert float((with_lora - plain).abs().max()) > 1e-3
    with pytest.raises(RuntimeError, match="UNet2DConditionModel.fuse_lora: quantized weights cannot be merged"):
        model.fuse_lora()
    with pytest.raises(RuntimeError, match="fuse_qkv_projections: quantized weights cannot be merged"):
        model.fuse_qkv_projections()
    layer = model.mid_block.attentions[0].transformer_blocks[0].attn1.to_q
    for safe in (False, True):
        with pytest.raises(RuntimeError, match="nor can adapters be merged into it"):
            layer.merge(safe_merge=safe)
    assert torch.equal(run(model, inputs), with_lora)
    for one in (model, twin):
        one.disable_adapters()
    close(run(model, inputs), run(twin, inputs))
    for one in (model, twin):
        one.delete_adapters("default")
    close(run(model, inputs), plain)
    accel.restore(model)
    assert torch.equal(run(model, inputs), run(stock, inputs))


def test_quantized_beneath_a_lora_that_was_there(tiny, unet):
    peft = pytest.importorskip("peft")
    model, inputs = unet(), tiny.inputs(unet())
    torch.manual_seed(5)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "proj_in"], init_lora_weights=False))
    stock, before = copy.deepcopy(model), tiny.snapshot(model)
    accel.optimize(model, weights="int8")
    assert any(row["path"].endswith("to_q.base_layer") for row in accel.report(model).weights)
    assert not any("lora" in row["path"] for row in accel.report(model).weights)
    close(run(model, inputs), run(rounded(stock, model), inputs))
    accel.restore(model)
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_saved_as_stock_saves_it(tiny, unet, tmp_path):
    from diffusers import UNet2DConditionModel

    model, inputs = unet(), tiny.inputs(unet())
    stock = copy.deepcopy(model)
    accel.optimize(model, weights="int8-asym")
    twin, wanted = rounded(stock, model), run(model, inputs)
    with pytest.warns(UserWarning, match="UNet2DConditionModel.save_pretrained: quantized weights are written out"):
        model.save_pretrained(tmp_path / "unet", max_shard_size="100KB", variant="fp32")
    loaded = UNet2DConditionModel.from_pretrained(tmp_path / "unet", variant="fp32")
    assert set(loaded.state_dict()) == set(twin.state_dict())
    for name, tensor in twin.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    close(run(loaded, inputs), wanted)
    assert torch.equal(run(model, inputs), wanted) and held_by(model)
    accel.restore(model)
    assert not {"save_pretrained", "fuse_lora", "fuse_qkv_projections"} & set(vars(model))


@pytest.mark.parametrize("buffers", [True, False])
def test_offloaded_afterwards(buffers, tiny, unet):
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    model, inputs = unet(), tiny.inputs(unet())
    stock = copy.deepcopy(model)
    accel.optimize(model, weights="int8")
    wanted = run(model, inputs)
    cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=buffers)
    close(run(model, inputs), wanted)
    with pytest.raises(PatchConflict, match="hook"):
        accel.restore(model)
    remove_hook_from_submodules(model)
    close(run(model, inputs), wanted)
    accel.restore(model)
    assert torch.equal(run(model, inputs), run(stock, inputs))


def test_offloaded_before_it_is_left_alone_and_says_so(tiny, unet):
    from accelerate import cpu_offload

    model, inputs = unet(), tiny.inputs(unet())
    stock = copy.deepcopy(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.warns(UserWarning, match="accel.optimize: nothing to quantize as 'int8': .*: an accelerate hook"):
        accel.optimize(model, weights="int8")
    assert not held_by(model) and {status for status, _ in rows(model).values()} == {"skipped"} and "" in rows(model)
    assert "an accelerate hook" in str(accel.report(model))
    close(run(model, inputs), run(stock, inputs))


# -- a pipeline --------------------------------------------------------------------------------------------------------


# docs/measurements/quantization.md says so.
@pytest.mark.parametrize(("weights", "told"), [("int8", 58.5), ("int8-asym", 57.5), ("fp8", 42.8)])
@pytest.mark.share(3)
def test_digits_stay_the_same(pipe, digits, ten_digits, stock_digits, weights, told):
    from diffusers.image_processor import VaeImageProcessor

    accel.optimize(pipe, weights=weights)
    ours = ten_digits(pipe)
    psnr = float(-10 * (ours - stock_digits()).square().mean().log10())
    assert psnr == pytest.approx(told, abs=1.5)
    assert {row["path"].partition(".")[0] for row in accel.report(pipe).weights} == {"unet"}
    images = VaeImageProcessor.numpy_to_pil(ours.permute(0, 2, 3, 1).numpy())
    assert sum(a == b for a, b in zip(digits.read_digits(images), range(10), strict=True)) >= 9
    accel.restore(pipe)
    assert torch.equal(ten_digits(pipe, 2), stock_digits(2))


def test_verify_judges_the_unet_and_tells_the_rest(pipe, monkeypatch):
    accel.optimize(pipe, weights="int8")
    quality = accel.verify(pipe, "a handwritten seven", num_inference_steps=4)
    assert quality.passed and quality.verdict.startswith("lossy, as asked for (weights='int8'): ")
    assert "PSNR" in quality.verdict and 45 < quality.psnr_db < 80
    assert quality.parts["unet"].error is not None and quality.parts["unet"].lossy is None
    assert "unet by itself is judged against stock code over the same quantized weights" in quality.note
    exact = product.dequantize
    monkeypatch.setattr(product, "dequantize", lambda weight, dtype: 1.001 * exact(weight, dtype))
    failed = accel.verify(pipe, "a handwritten seven", num_inference_steps=4)
    assert not failed.passed and failed.verdict.startswith("FAILED: unet: ")
    assert type(pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_q) is QuantizedLinear


def test_verify_of_a_model_alone(tiny, unet):
    model = accel.optimize(unet(), weights="int8")
    quality = accel.verify(model, **tiny.inputs(model))
    assert quality.passed and quality.lossy == "weights='int8'" and 30 < quality.psnr_db < 80
    assert quality.parts["over the same weights"].psnr_db > 100


def test_with_the_step_cache(pipe):
    def drawn():
        generator = torch.Generator().manual_seed(0)
        return pipe("a handwritten two", generator=generator, num_inference_steps=12, output_type="pt").images

    stock = copy.deepcopy(pipe.unet)
    accel.optimize(pipe, weights="int8", step_cache=3)
    quantized, ours = pipe.unet, drawn()
    assert accel.report(pipe).fallbacks == []
    pipe.unet = rounded(stock, quantized)
    accel.optimize(pipe, step_cache=3)
    torch.testing.assert_close(ours, drawn(), rtol=0, atol=1e-3)


def test_a_pipeline_is_saved_and_quantized_anew(pipe, tmp_path, tiny):
    from diffusers import DiffusionPipeline

    accel.optimize(pipe, weights="int8")
    with pytest.warns(UserWarning, match="written out in the model's dtype"):
        pipe.save_pretrained(tmp_path)
    loaded = DiffusionPipeline.from_pretrained(tmp_path)
    held = held_by(pipe.unet)[5]
    path = next(path for path, module in pipe.unet.named_modules() if module is held)
    assert torch.equal(loaded.unet.get_submodule(path).weight, held.quantized.dequantized(torch.float32))
    accel.optimize(pipe, weights="fp8")
    assert {row["scheme"] for row in accel.report(pipe).weights} == {"fp8 by row"}
    accel.optimize(pipe)
    assert not held_by(pipe.unet) and accel.report(pipe).weights == [] and PLAN in vars(pipe.unet)
