"""What users do with quantized denoisers: copies, adapters, files, offloading, whole pipelines."""

import copy
import pickle

import pytest
import torch
from accel_kernels import int8_linear

import accel
from accel.planning.plan import PLAN
from accel.quantization import product
from accel.quantization.activations import RowProducts
from accel.quantization.module import QuantizedLinear
from accel.verification import rounded_products as judging
from support.diffusion.oracles import EXACT, options, oracle
from support.diffusion.outputs import close, error, run
from support.llm.quantized import held_by, rounded
from support.patched import sites


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
    with pytest.warns(UserWarning, match="weights stay quantized"):
        accel.restore(model)
    close(run(model, inputs), wanted)
    accel.optimize(model)  # they are the model's own now, and fused as such
    close(run(model, inputs), wanted)
    assert accel.report(model).fallbacks == [] and "transformer block" in {row[1] for row in accel.report(model).sites}


@pytest.mark.parametrize("activations", [None, "int8"])
@pytest.mark.turns(2)
def test_lora_on_top(activations, unet_and_inputs, in_double):
    peft = pytest.importorskip("peft")
    stock, inputs = unet_and_inputs("sdxl")
    model = accel.optimize(copy.deepcopy(stock), weights="int8", activations=activations)
    twin, plain = oracle(stock, model), run(model, inputs)
    targets = ["to_q", "to_out.0", "ff.net.0.proj", "conv1", "time_emb_proj"]
    for one in (model, twin):
        torch.manual_seed(5)
        one.add_adapter(peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
        one.double()
    for path, module in twin.named_modules() if activations else ():  # the base alone sees rounded rows
        base = path.endswith("base_layer") and isinstance(module, torch.nn.Linear) and "time_emb" not in path
        assert not base or module._forward_pre_hooks
    in_double()
    with_lora = run(model, inputs)
    close(with_lora, run(twin, inputs), EXACT)
    assert error(with_lora, plain) > 1e-3
    for merge in ("fuse_lora", "fuse_qkv_projections"):
        with pytest.raises(RuntimeError, match=f"UNet2DConditionModel.{merge}: quantized weights cannot be merged"):
            getattr(model, merge)()
    layer = model.mid_block.attentions[0].transformer_blocks[0].attn1.to_q
    for safe in (False, True):
        with pytest.raises(RuntimeError, match="nor can adapters be merged into it"):
            layer.merge(safe_merge=safe)
    assert torch.equal(run(model, inputs), with_lora)
    for change in ("disable_adapters", "enable_adapters", "delete_adapters"):
        for one in (model, twin):
            getattr(one, change)(*["default"] * (change == "delete_adapters"))
        close(run(model, inputs), run(twin, inputs), EXACT)
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


def test_offloaded_before_it_is_left_alone_and_says_so(tiny, unet):
    from accelerate import cpu_offload

    model, inputs = unet(), tiny.inputs(unet())
    stock = copy.deepcopy(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.warns(UserWarning, match="accel.optimize: nothing to quantize as 'int8': .*: an accelerate hook"):
        accel.optimize(model, weights="int8")
    assert (
        not held_by(model)
        and {status for status, _ in sites(model, "weights").values()} == {"skipped"}
        and "" in sites(model, "weights")
    )
    assert "an accelerate hook" in str(accel.report(model))
    close(run(model, inputs), run(stock, inputs))


# docs/measurements/quantization.md says so.
@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ({"weights": "int8"}, 58.5),
        ({"weights": "int8-asym"}, 57.5),
        ({"weights": "fp8"}, 42.8),
        (options("int8-outliers"), 49.3),
        (options("fp8"), 38.7),
        (options("int8"), 48.4),
    ],
    ids=str,
)
@pytest.mark.share(12)
@pytest.mark.turns(4)
def test_digits_stay_the_same(chosen, told, pipe, digits, ten_digits, stock_digits):
    from diffusers.image_processor import VaeImageProcessor

    accel.optimize(pipe, **chosen)
    ours = ten_digits(pipe)
    assert float(-10 * (ours - stock_digits()).square().mean().log10()) == pytest.approx(told, abs=1.5)
    assert {row["path"].partition(".")[0] for row in accel.report(pipe).weights} == {"unet"}
    images = VaeImageProcessor.numpy_to_pil(ours.permute(0, 2, 3, 1).numpy())
    assert sum(a == b for a, b in zip(digits.read_digits(images), range(10), strict=True)) >= 9
    accel.restore(pipe)
    assert torch.equal(ten_digits(pipe, 2), stock_digits(2))


@pytest.mark.parametrize(("pipeline", "activations"), [("pipe", None), ("pipe", "int8"), ("dit", "int8")])
@pytest.mark.share(2)
@pytest.mark.turns(4)
def test_verify_judges_the_model_and_tells_the_rest(request, pipeline, activations, monkeypatch):
    pipe, name = request.getfixturevalue(pipeline), "unet" if pipeline == "pipe" else "transformer"
    accel.optimize(pipe, weights="int8", activations=activations)
    quality = accel.verify(pipe, "a handwritten seven", num_inference_steps=2)
    lossy = "weights='int8'" if activations is None else "weights='int8', activations='int8'"
    assert quality.passed and quality.verdict.startswith(f"lossy, as asked for ({lossy}): ")
    assert "PSNR" in quality.verdict and 25 < quality.psnr_db < 80 and "GMSD" in str(quality)
    assert quality.parts[name].error is not None and quality.parts[name].lossy is None
    judged = {f"{name}: rounded rows", f"{name}: their products"}
    assert judged & set(quality.parts) == (judged if activations else set())
    assert f"{name} by itself is judged against stock code over the same quantized weights" in quality.note
    if activations is None:
        exact = product.dequantize
        monkeypatch.setattr(product, "dequantize", lambda weight, dtype: 1.001 * exact(weight, dtype))
    else:
        wrong = RowProducts(int8_linear=lambda *given, **more: 1.01 * int8_linear(*given, **more))
        monkeypatch.setattr(judging, "KERNELS", wrong)
    failed = accel.verify(pipe, "a handwritten seven", num_inference_steps=2)
    assert failed.verdict.startswith(f"FAILED: {name}: " + ("their products: " if activations else ""))
    assert any(type(module) is QuantizedLinear for module in getattr(pipe, name).modules())


@pytest.mark.turns(2)
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
