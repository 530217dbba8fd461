"""Profiles of forwards at toy sizes: what they write, and what a failure leaves."""

import json

import pytest
import torch

import accel
from accel.bench.diffusion.cases import CASES
from benchmarks.models import launches
from benchmarks.study import Study

pytestmark = pytest.mark.usefixtures("few_objects")


def test_kernels_are_grouped_by_their_names():
    names = {
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_bias_TNT": "GEMM",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x1_tn_align8>": "GEMM",
        "hopper_gemm_kernel": "GEMM",
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
    assert {name: launches.group_of(name) for name in names} == names


@pytest.mark.turns(2)
def test_a_profile_has_what_each_variant_launches(tmp_path, monkeypatch, capsys):
    launches.main("tiny", tmp_path / "profile.json")
    found = json.loads((tmp_path / "profile.json").read_text())
    assert found["case"] == "tiny" and found["failed"] == []
    for variant in (found["variants"][name] for name in ("stock", "accel")):
        assert variant["launches"] > 20 and variant["kernels"][0]["ms"] == max(row["ms"] for row in variant["kernels"])
        assert {"convolution", "copies", "norm and elementwise"} <= variant["groups"].keys()
    assert "stock: " in capsys.readouterr().out
    monkeypatch.setattr(accel, "optimize", lambda module: 1 / 0)
    left = Study("tiny", None, variants={})
    launches.profile_case(CASES["tiny"], torch.float32, False, left)
    assert left.failed == [{"variant": "accel", "reason": "ZeroDivisionError: division by zero"}]
    assert list(left.body["variants"]) == ["stock"]
