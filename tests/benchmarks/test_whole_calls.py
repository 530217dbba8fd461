"""benchmarks/whole_calls.py and transformer_profile.py at toy sizes: what they write, and what a failure leaves."""

import json
import sys
from pathlib import Path

import pytest
import torch

import accel
from accel.bench.cases import CASES

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (8, 8),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "latent_channels": 4,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
}
MODELS = {
    "flux": {
        "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
        "joint_attention_dim": 32, "pooled_projection_dim": 32, "guidance_embeds": True, "axes_dims_rope": (4, 4, 8),
    },
    "zimage": {
        "in_channels": 4, "dim": 32, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2,
        "cap_feat_dim": 32, "axes_dims": [4, 4, 8], "axes_lens": [1024, 16, 16],
    },
}  # fmt: skip


@pytest.fixture
def tiny_calls(script, monkeypatch, few_objects):
    """whole_calls with pipelines of toy size, in float32."""
    pipelines, calls = script("call_pipelines"), script("whole_calls")

    def tiny_pipeline(name, device, dtype):
        return pipelines.transformer_pipeline(name, device, torch.float32, MODELS[name], VAE, 16)

    monkeypatch.setattr(pipelines, "BUILDERS", dict.fromkeys(MODELS, tiny_pipeline))
    monkeypatch.setattr(calls, "STEPS", dict.fromkeys(MODELS, 2))
    monkeypatch.setattr(calls, "CALLS", 1)
    return calls


def run(calls, monkeypatch, out, *names):
    monkeypatch.setattr(sys, "argv", ["whole_calls.py", *names, "--out", str(out)])
    calls.main()
    return [json.loads((out / f"cpu-{name}-call.json").read_text()) for name in names if not name.startswith("-")]


def test_transformers_draw_images_from_embeddings(tiny_calls, tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: compiled.append(type(module).__name__))
    for found in run(tiny_calls, monkeypatch, tmp_path, "flux", "zimage", "--compile"):
        (row,) = found["schedulers"].values()
        assert "failed" not in found and "bfloat16" in found["about"]
        assert {"stock", "accel", "compile"} <= row.keys() and row["psnr_db"] > 60
        assert all(len(row[name]["first_s"]) == 3 and row[name]["s"] > 0 for name in ("stock", "accel", "compile"))
    assert {"FluxTransformerBlock", "FluxSingleTransformerBlock", "ZImageTransformerBlock"} == set(compiled)


def test_step_caches_are_timed_in_the_same_process(tiny_calls, tmp_path, monkeypatch):
    (found,) = run(tiny_calls, monkeypatch, tmp_path, "flux", "--intervals=2,3")
    (row,) = found["schedulers"].values()
    assert all(row[f"accel, step cache, interval {n}"]["s"] > 0 for n in (2, 3))


def test_what_fails_leaves_what_was_measured_and_the_next_case(tiny_calls, tmp_path, monkeypatch):
    def fails(pipe, **options):
        raise RuntimeError("no luck")

    monkeypatch.setattr(accel, "optimize", fails)
    for found in run(tiny_calls, monkeypatch, tmp_path, "flux", "zimage"):
        (row,) = found["schedulers"].values()
        assert found["failed"] == "RuntimeError: no luck" and row.keys() == {"stock"}


def test_kernels_are_grouped_by_their_names(script):
    group_of = script("transformer_profile").group_of
    names = {
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_bias_TNT": "GEMM",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x1_tn_align8>": "GEMM",
        "linear_geglu_kernel": "GEMM",
        "triton_tem_fused_addmm_gelu_3": "GEMM",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": "attention",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>": "attention",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80": "attention",
        "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc": "convolution",
        "Memcpy DtoD (Device -> Device)": "copies",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(...)>": "copies",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<OpaqueType<2u>>": "copies",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16>": "norm and elementwise",
        "triton_poi_fused__scaled_dot_product_flash_attention_addmm_cat_1": "norm and elementwise",
        "rms_norm_kernel": "norm and elementwise",
    }
    assert {name: group_of(name) for name in names} == names


def test_a_profile_has_what_each_variant_launches(script, tmp_path, monkeypatch, capsys, few_objects):
    profile, out = script("transformer_profile"), tmp_path / "profile.json"
    monkeypatch.setattr(sys, "argv", ["transformer_profile.py", "tiny", str(out)])
    profile.main()
    found = json.loads(out.read_text())
    assert found["case"] == "tiny" and found["failed"] == {}
    for variant in (found["variants"][name] for name in ("stock", "accel")):
        assert variant["launches"] > 20 and variant["kernels"][0]["ms"] == max(row["ms"] for row in variant["kernels"])
        assert {"convolution", "copies", "norm and elementwise"} <= variant["groups"].keys()
    assert "stock: " in capsys.readouterr().out
    monkeypatch.setattr(accel, "optimize", lambda module: 1 / 0)
    left = profile.profile_case(CASES["tiny"], CPU, torch.float32, False, lambda result: None)
    assert left["failed"] == {"accel": "ZeroDivisionError: division by zero"} and list(left["variants"]) == ["stock"]
