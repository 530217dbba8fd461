"""Diffusion transformers and decoders of video: real sizes by their counts of parameters, tiny ones by whole runs."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import accel
from accel.bench import compiled, runner
from accel.bench.case import cast, shapes
from accel.bench.dit.inputs import Sizes
from accel.bench.dit.published import PUBLISHED
from accel.bench.dit.weights import EmptyInDtype
from support.compatibility.tiny_diffusers_models import build

pytestmark = pytest.mark.usefixtures("few_objects")  # a run collects garbage many times
CPU = torch.device("cpu")
MILLIONS = {
    "flux": 11901.4,
    "flux2": 32223.3,
    "sd3": 2028.3,
    "zimage": 6154.9,
    "qwen-image": 20430.4,
    "wan": 1419.0,
    "wan-14b": 14288.5,
    "ltx": 1923.4,
    "pixart": 610.9,
    "hunyuan-video": 12821.0,
    "vae-wan": 126.9,
    "vae-ltx": 419.2,
    "vae-hunyuan": 246.5,
}
SIZES = {
    "flux": Sizes(1, 8, 8, tokens=5),
    "flux2": Sizes(1, 8, 8, tokens=5, steps=2),
    "sd3": Sizes(2, 8, 8, tokens=5),
    "zimage": Sizes(2, 8, 8, tokens=5),
    "qwen-image": Sizes(2, 8, 8, tokens=6, steps=2),
    "qwen-image-masked": Sizes(2, 8, 8, tokens=6, steps=2),
    "wan": Sizes(1, 4, 6, frames=3, tokens=5, steps=2),
    "ltx": Sizes(2, 2, 3, frames=3, tokens=5),
    "pixart": Sizes(2, 8, 8, tokens=6),
    "hunyuan-video": Sizes(1, 4, 6, frames=3, tokens=5, steps=2),
    "vae-wan": Sizes(1, 4, 6, frames=3, steps=2),
    "vae-ltx": Sizes(1, 2, 2, frames=2, steps=2),
    "vae-hunyuan": Sizes(1, 2, 2, frames=5, steps=2),
}
TINY = list(SIZES)
# What makes a published configuration tiny, where that of `build` does not.
CONFIGS = {
    "pixart": {"sample_size": 8, "num_layers": 1, "cross_attention_dim": 32, "caption_channels": 32}
    | {"num_attention_heads": 2, "attention_head_dim": 16},
    "vae-wan": {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 1, "temperal_downsample": [True]},
    "vae-ltx": {"latent_channels": 8, "patch_size": 1}
    | dict.fromkeys(("block_out_channels", "decoder_block_out_channels"), (8,) * 4)
    | dict.fromkeys(("layers_per_block", "decoder_layers_per_block"), (1,) * 5),
    "vae-hunyuan": {"latent_channels": 4, "block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4},
}


def tiny_case(name):
    published = published_case(name)
    config = CONFIGS.get(name) or dict(build(published.class_name).config)
    config = {key: value for key, value in config.items() if key in published.config}
    return replace(published, config=published.config | config, sizes=SIZES[name]).case()


def published_case(name):
    (found,) = (published for published in PUBLISHED if published.name == name)
    return found


def test_every_configuration_is_counted():
    counted = [published_case(name).config for name in MILLIONS]
    assert all(published.config in counted for published in PUBLISHED)


@pytest.mark.parametrize("name", MILLIONS)
def test_weights_are_of_the_published_sizes(name):
    model = published_case(name).case().build(torch.device("meta"), torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(MILLIONS[name], abs=0.1)
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    for path, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if set(kept) & set(path.split(".")) else torch.bfloat16), path
    assert all(buffer._base is None for buffer in model.buffers())  # none holds on to another tensor


@pytest.mark.parametrize("name", TINY)
def test_a_run_of_a_tiny_one(name):
    """The whole of a run but for the compiler: inputs, full precision, accel's check, timing."""
    case, kept = tiny_case(name), []
    result = runner.run(case, CPU, torch.float32, compiled=False, ready=False, budget_s=0.01, keep=kept.append)
    assert result["error"]["accel_vs_stock"] <= 1e-5 and result["restored_bit_equal"] is True
    assert ("stock_vs_fp32" in result["error"]) == (case.exact > 0)
    assert result["stock"]["median_ms"] > 0 < result["accel"]["median_ms"] and "failed" not in result
    assert len(kept) == 2 and result["weights_gb"] > 0 and result["shapes"]


@pytest.mark.parametrize("name", TINY)
def test_calls_differ_in_latents_and_time_alone(name):
    case = tiny_case(name)
    model, calls = case.build(CPU, torch.bfloat16), case.inputs(CPU, torch.bfloat16)
    new = {key for key, value in calls[0].items() if value is not calls[1][key]}
    prompt = new - {"hidden_states", "timestep", "x", "t", "z"}
    assert all(calls[0][key] == calls[1][key] for key in prompt if not isinstance(calls[0][key], torch.Tensor))
    assert not [key for key in prompt if isinstance(calls[0][key], torch.Tensor)]
    with torch.no_grad():
        outputs = [case.call(model, kwargs) for kwargs in calls]
        again = case.call(case.build(CPU, torch.bfloat16), case.inputs(CPU, torch.bfloat16)[0])
    assert all(output.isfinite().all() and output.std() > 0.1 for output in outputs)
    assert not torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], again)


@pytest.mark.parametrize("name", TINY)
def test_no_weight_hides_what_comes_behind_it(name):
    for path, parameter in tiny_case(name).build(CPU, torch.float32).named_parameters():
        assert parameter.isfinite().all() and not (parameter == 0).all() and not (parameter == 1).any(), path


@pytest.mark.parametrize("name", [name for name in TINY if not name.startswith("vae")])
def test_the_compiler_gets_the_blocks_that_repeat(name):
    model = tiny_case(name).build(CPU, torch.float32)
    compiled.compile_blocks(model)  # which compiles nothing before a call
    blocks = [path for path, child in model.named_modules() if child._compiled_call_impl is not None]
    lists = [path for path, child in model.named_modules() if isinstance(child, nn.ModuleList)]
    inside = {path for path in blocks if path.rpartition(".")[0] in lists}
    assert inside and model._compiled_call_impl is None
    others = set(blocks) - inside
    assert {type(model.get_submodule(path)).__name__ for path in others} <= {
        "PatchEmbed",
        "HunyuanVideoPatchEmbed",
        "HunyuanVideoTokenRefiner",
    }


def test_a_class_without_such_blocks_is_told():
    with pytest.raises(ValueError, match="Linear names no blocks that repeat"):
        compiled.compile_blocks(nn.Linear(2, 2))


def test_a_compiled_step_gives_its_first_output(monkeypatch):
    """Without a compiler, which takes seconds."""
    monkeypatch.setattr(torch, "compile", lambda function, mode: function)
    for name, kind in (("zimage", "blocks"), ("wan", "whole")):
        case = replace(tiny_case(name), compiled=kind)
        model, calls = case.build(CPU, torch.float32), case.inputs(CPU, torch.float32)
        monkeypatch.setattr(nn.Module, "compile", lambda module, **options: None)
        with torch.no_grad():
            assert torch.equal(compiled.compiled_step(case, model, calls)(1), case.call(model, calls[1]))


def test_accel_that_fails_leaves_the_figures_of_stock(monkeypatch):
    def fails(module, **options):
        next(module.parameters()).data.zero_()
        raise RuntimeError("no luck\nand more")

    case = tiny_case("flux")
    monkeypatch.setattr(accel, "optimize", fails)
    result = runner.run(case, CPU, torch.float32, compiled=False, ready=False, budget_s=0.01)
    assert result["failed"] == {"accel": "RuntimeError: no luck"}
    assert result["stock"]["calls"] > 0 and "accel" not in result


def test_a_compiler_that_fails_leaves_the_others(monkeypatch):
    def fails(case, module, inputs):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(runner, "compiled_step", fails)
    result = runner.run(tiny_case("pixart"), CPU, torch.float32, ready=False, budget_s=0.01)
    assert result["compile_failed"] == "RuntimeError: no compiler"
    assert {"stock", "accel"} <= result.keys() and "compile" not in result


def test_what_fails_while_it_is_timed_leaves_the_others(monkeypatch):
    def step(case, module, inputs):
        ran = []

        def one(i):
            ran.append(i)
            if len(ran) > 6:
                raise RuntimeError("late")
            return case.call(module, inputs[i % len(inputs)])

        return one

    monkeypatch.setattr(runner, "compiled_step", step)
    result = runner.run(replace(tiny_case("pixart"), compiled="whole"), CPU, torch.float32, ready=False, budget_s=0.01)
    assert result["failed"]["compile"] == "RuntimeError: late"
    assert {"stock", "accel"} <= result.keys() and "compile" not in result


def test_a_limit_leaves_out_what_takes_long():
    result = runner.run(tiny_case("pixart"), CPU, torch.float32, budget_s=0.01, limit_s=1e-9)
    assert result["skipped"] == ["torch.compile", "time to ready"]
    assert {"stock", "accel"} <= result.keys() and "compile" not in result


def test_without_full_precision_accel_is_compared_with_stock(monkeypatch):
    case = replace(tiny_case("flux"), exact=0)
    result = runner.run(case, CPU, torch.float32, compiled=False, ready=False, budget_s=0.01)
    assert result["error"].keys() == {"measure", "accel_vs_stock", "accel_vs_stock_max_abs"}
    for change in (lambda output: output * 1.01, lambda output: output.clone().fill_(torch.nan)):

        class Changed:
            def __init__(self, stock, change=change):
                self.stock, self.change = stock, change

            def __call__(self, *args, **kwargs):
                return (self.change(self.stock(*args, **kwargs)[0]),)

        def spoil(module, Changed=Changed):
            module.forward = Changed(type(module).forward.__get__(module))

        monkeypatch.setattr(accel, "optimize", spoil)
        with pytest.raises(runner.WrongResult):
            runner.run(case, CPU, torch.float32, compiled=False, ready=False, budget_s=0.01)


def test_full_precision_that_does_not_fit_leaves_the_bound_from_stock(monkeypatch):
    def too_large(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runner.accuracy, "reference", too_large)
    result = runner.run(tiny_case("flux"), CPU, torch.float32, compiled=False, ready=False, budget_s=0.01)
    assert "CUDA out of memory" in result["reference_failed"]
    assert result["error"]["measure"].startswith("relative RMS against stock") and "accel" in result


def test_stock_beside_shares_memory_and_no_parameter():
    model = tiny_case("zimage").build(CPU, torch.float32)
    twin = runner.stock_twin(model)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert one is not other and one.data_ptr() == other.data_ptr()


def test_lists_of_tensors_have_shapes_and_a_dtype():
    given = {"x": [torch.zeros(1, 2), torch.zeros(3)], "img_shapes": [[(1, 4, 4)]], "mask": None}
    assert shapes(given) == {"x.0": [1, 2], "x.1": [3]}
    made = cast(given, torch.float64)
    assert [part.dtype for part in made["x"]] == [torch.float64] * 2 and made["img_shapes"] == [[(1, 4, 4)]]


def test_only_empty_tensors_without_a_dtype_get_one():
    with EmptyInDtype(torch.bfloat16):
        made = [torch.empty(2), torch.empty(2, dtype=torch.float32), torch.ones(2), nn.Linear(2, 2).weight]
    assert [tensor.dtype for tensor in made] == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
