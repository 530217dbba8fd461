"""The cases of `accel bench`: real sizes by their counts of parameters, tiny ones by whole runs."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import accel
from accel.bench import compiled
from accel.bench.diffusion import runner
from accel.bench.diffusion.case import shapes
from accel.bench.diffusion.cases import CASES, select
from accel.bench.diffusion.configs import whole_config
from accel.bench.diffusion.inputs import Sizes
from accel.bench.diffusion.subject import of_case
from accel.bench.weights import EmptyInDtype
from support.compatibility.tiny_diffusers_models import build

pytestmark = pytest.mark.usefixtures("few_objects")  # a run collects garbage many times
CPU = torch.device("cpu")
MILLIONS = {
    "sd15": 859.5, "sd21": 865.9, "sdxl": 2567.5, "vae512": 83.7, "flux": 11901.4, "flux2": 32223.3, "sd3": 2028.3,
    "zimage": 6154.9, "qwen-image": 20430.4, "wan": 1419.0, "wan-14b": 14288.5, "ltx": 1923.4, "pixart": 610.9,
    "hunyuan-video": 12821.0, "vae-wan": 126.9, "vae-ltx": 419.2, "vae-hunyuan": 246.5,
}  # fmt: skip
SIZES = {
    "flux": Sizes(1, 8, 8, 5),
    "flux2": Sizes(1, 8, 8, 5, steps=2),
    "sd3": Sizes(2, 8, 8, 5),
    "zimage": Sizes(2, 8, 8, 5),
    "qwen-image": Sizes(2, 8, 8, 6, steps=2),
    "qwen-image-masked": Sizes(2, 8, 8, 6, steps=2),
    "wan": Sizes(1, 4, 6, 5, frames=3, steps=2),
    "ltx": Sizes(2, 2, 3, 5, frames=3),
    "pixart": Sizes(2, 8, 8, 6),
    "hunyuan-video": Sizes(1, 4, 6, 5, frames=3, steps=2),
    "vae-wan": Sizes(1, 4, 6, frames=3, steps=2),
    "vae-ltx": Sizes(1, 2, 2, frames=2, steps=2),
    "vae-hunyuan": Sizes(1, 2, 2, frames=5, steps=2),
}
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
    case = CASES[name]
    config = CONFIGS.get(name) or dict(build(case.class_name).config)
    known = whole_config(case.class_name, case.config)
    return replace(case, config=case.config | {k: v for k, v in config.items() if k in known}, sizes=SIZES[name])


def run(case, budget_s=0.01, **given):
    make = partial(of_case, case, CPU, torch.float32)
    return runner.run(case.name, make, CPU, torch.float32, budget_s=budget_s, **given)


def test_without_names_every_unet_and_its_decoder_or_the_tiny_one():
    assert [case.name for case in select([], CPU)] == ["tiny"]
    on_gpu = [case.name for case in select([], torch.device("cuda"))]
    assert on_gpu == ["sd15", "sd15-b16", "sd21", "sdxl", "vae512", "vae1024", "vae-sdxl"]
    assert [case.name for case in select(["sdxl", "sd15", "sdxl"], CPU)] == ["sdxl", "sd15"]


def test_every_configuration_is_counted():
    counted = [(CASES[name].class_name, CASES[name].config) for name in MILLIONS]
    assert all((case.class_name, case.config) in counted for name, case in CASES.items() if name != "tiny")


@pytest.mark.share(8)
@pytest.mark.parametrize("name", MILLIONS)
@pytest.mark.turns(2)
def test_weights_are_of_the_published_sizes(name):
    """Built on the meta device, so that it costs nothing: the parameter counts everybody knows."""
    model = CASES[name].build(torch.device("meta"), torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(MILLIONS[name], abs=0.1)
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    for path, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if set(kept) & set(path.split(".")) else torch.bfloat16), path
    assert all(buffer._base is None for buffer in model.buffers())  # none holds on to another tensor


@pytest.mark.parametrize("name", SIZES)
def test_a_run_of_a_tiny_one(name):
    """The whole of a run but for the compiler: inputs, full precision, accel's check, timing."""
    kept = []
    result = run(tiny_case(name), keep=kept.append)
    assert result["error"]["accel_vs_stock"] <= 1e-5 and result["restored_bit_equal"] is True
    assert result["error"]["accel_vs_fp32"] >= 0 and result["error"]["stock_vs_fp32"] >= 0
    assert result["stock"]["median_ms"] > 0 < result["accel"]["median_ms"] and result["failed"] == []
    assert len(kept) == 2 and result["weights_gb"] > 0 and result["shapes"]


@pytest.mark.parametrize("name", SIZES)
def test_calls_differ_in_latents_and_time_alone_and_no_weight_hides_what_comes_behind_it(name):
    case = tiny_case(name)
    model, calls = case.build(CPU, torch.bfloat16), case.inputs(CPU, torch.bfloat16)
    new = {key for key, value in calls[0].items() if value is not calls[1][key]}
    assert new <= {"hidden_states", "timestep", "x", "t", "z"}
    with torch.no_grad():
        outputs = [case.call(model, kwargs) for kwargs in calls]
        again = case.call(case.build(CPU, torch.bfloat16), case.inputs(CPU, torch.bfloat16)[0])
    assert all(output.isfinite().all() and output.std() > 0.1 for output in outputs)
    assert not torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], again)
    for path, parameter in case.build(CPU, torch.float32).named_parameters():
        assert parameter.isfinite().all() and not (parameter == 0).all() and not (parameter == 1).any(), path


@pytest.mark.parametrize("name", [name for name in SIZES if not name.startswith("vae")])
def test_the_compiler_gets_the_blocks_that_repeat(name):
    model = tiny_case(name).build(CPU, torch.float32)
    compiled.compile_blocks(model)  # which compiles nothing before a call
    blocks = [path for path, child in model.named_modules() if child._compiled_call_impl is not None]
    lists = [path for path, child in model.named_modules() if isinstance(child, nn.ModuleList)]
    inside = {path for path in blocks if path.rpartition(".")[0] in lists}
    assert inside and model._compiled_call_impl is None
    others = {type(model.get_submodule(path)).__name__ for path in set(blocks) - inside}
    assert others <= {"PatchEmbed", "HunyuanVideoPatchEmbed", "HunyuanVideoTokenRefiner"}


def test_a_class_without_such_blocks_is_told():
    with pytest.raises(ValueError, match="Linear names no blocks that repeat"):
        compiled.compile_blocks(nn.Linear(2, 2))


def test_a_compiled_step_gives_its_first_output(monkeypatch):
    """Without a compiler, which takes seconds."""
    monkeypatch.setattr(torch, "compile", lambda function, mode: function)
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: None)
    for name, kind in (("zimage", "blocks"), ("wan", "whole")):
        case = replace(tiny_case(name), compiled=kind)
        model, calls = case.build(CPU, torch.float32), case.inputs(CPU, torch.float32)
        with torch.no_grad():
            assert torch.equal(compiled.compiled_step(case, model, calls)(1), case.call(model, calls[1]))


def test_accel_that_fails_leaves_the_figures_of_stock(monkeypatch):
    def fails(module, **options):
        next(module.parameters()).data.zero_()
        raise RuntimeError("no luck\nand more")

    monkeypatch.setattr(accel, "optimize", fails)
    result = run(tiny_case("flux"))
    assert result["failed"] == [{"variant": "accel", "reason": "RuntimeError: no luck"}]
    assert result["stock"]["calls"] > 0 and "accel" not in result


@pytest.mark.parametrize("late", [False, True])
def test_a_compiler_that_fails_leaves_the_others(late, monkeypatch):
    """While it gets ready, or while it is timed."""

    case = replace(tiny_case("pixart"), compiled="whole")

    def compiled_step(case, module, inputs):
        ran = []

        def step(i):
            ran.append(i)
            if not late or len(ran) > 6:
                raise RuntimeError("no compiler")
            return case.call(module, inputs[i % len(inputs)])

        return step

    monkeypatch.setattr(runner, "compiled_step", compiled_step)
    result = run(case, compiled=case)
    assert result["failed"] == [{"variant": "compile", "reason": "RuntimeError: no compiler"}]
    assert {"stock", "accel"} <= result.keys() and "compile" not in result


def test_a_limit_leaves_out_what_takes_long():
    result = run(case := tiny_case("pixart"), compiled=case, limit_s=1e-9)
    assert [row["case"] for row in result["skipped"]] == ["torch.compile"]
    assert {"stock", "accel"} <= result.keys() and "compile" not in result


def test_stock_beside_shares_memory_and_no_parameter():
    model = tiny_case("zimage").build(CPU, torch.float32)
    twin = runner.stock_twin(model)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert one is not other and one.data_ptr() == other.data_ptr()


def test_lists_of_tensors_have_shapes():
    given = {"x": [torch.zeros(1, 2), torch.zeros(3)], "img_shapes": [[(1, 4, 4)]], "mask": None}
    assert shapes(given) == {"x.0": [1, 2], "x.1": [3]}


def test_only_empty_tensors_without_a_dtype_get_one():
    with EmptyInDtype(torch.bfloat16):
        made = [torch.empty(2), torch.empty(2, dtype=torch.float32), torch.ones(2), nn.Linear(2, 2).weight]
    assert [tensor.dtype for tensor in made] == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
