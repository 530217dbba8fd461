"""Attention in plain torch."""

import pytest
import torch
import torch.nn.functional as F
from accel_kernels.attention import math_attention
from accel_kernels.attention.math_attention import MathAttention

MASK = torch.ones(5, 7, dtype=torch.bool).tril(2)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"is_causal": True},
        {"attn_mask": MASK},
        {"attn_mask": MASK.float().log()},
        {"scale": 0.3},
        {"enable_gqa": True},
    ],
    ids=["plain", "causal", "mask", "added mask", "scale", "groups"],
)
def test_it_is_torchs_own(given: dict):
    torch.manual_seed(0)
    heads = 2 if given.get("enable_gqa") else 4
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, heads, 7, 8), torch.randn(2, heads, 7, 8)
    wanted = F.scaled_dot_product_attention(q, k, v, **given)
    torch.testing.assert_close(math_attention._attention(q, k, v, **given), wanted, rtol=1e-5, atol=1e-6)


def test_on_a_cpu_nothing_is_another(monkeypatch):
    monkeypatch.setattr(math_attention, "_attention", None)
    q = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    with MathAttention():
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), F.scaled_dot_product_attention(q, q, q))
