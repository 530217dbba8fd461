"""Kernels that two cards launch in one warmup: each card has its own, loaded into its own context."""

import pytest
import torch
from accel_kernels.norm.rms_norm_triton import rms_norm
from accel_kernels.warmup import warmup

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def test_a_kernel_warmed_up_for_both_cards_runs_on_each():
    rows = [torch.randn(3, 1016, device=f"cuda:{card}", dtype=torch.float16) for card in range(2)]
    weights = [torch.randn(1016, device=x.device, dtype=x.dtype) for x in rows]
    streams = [torch.cuda.Stream(x.device) for x in rows]  # another context's kernel is refused there

    def run():
        found = []
        for x, weight, stream in zip(rows, weights, streams, strict=True):
            with torch.cuda.device(x.device), torch.cuda.stream(stream):
                stream.wait_stream(torch.cuda.default_stream(x.device))
                found.append(rms_norm(x, weight, 1e-6))
        return found

    with warmup():
        run()
    for x, weight, got in zip(rows, weights, run(), strict=True):
        torch.cuda.synchronize(x.device)
        wanted = x.float() * x.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt() * weight.float()
        torch.testing.assert_close(got.float(), wanted, rtol=4e-3, atol=4e-3)
