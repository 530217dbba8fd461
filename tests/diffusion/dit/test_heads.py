"""Norms over whole rows and rotations of their heads are one pass, where every head is rotated alike."""

import pytest
import torch
import torch.nn.functional as F
from accel_kernels import rowwise

from support.diffusion.programs import Formula, Planned, as_complex, assigned, halves, rand

B, S, H, D = 2, 5, 3, 8
C = H * D


def norm(x, w):
    return F.rms_norm(x, (C,), w, 1e-6)


def norm_by_hand(x, w):
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def rotated(norm, rotation):
    def forward(x, cos, sin, w, wide):
        q = norm(F.linear(x, wide), w).unflatten(-1, (H, D))
        q = rotation(q, cos, sin).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q)

    return forward


def planned(forward, dtype=torch.float32, heads=1, **more):
    tables = [rand(1, S, heads, D, seed=seed) for seed in (2, 3)]
    module = Formula(forward, w=rand(C, seed=4, dtype=dtype), wide=rand(C, C, seed=5, dtype=dtype) / 4)
    return Planned(module, rand(B, S, C, dtype=dtype), *tables, **more)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, H])
@pytest.mark.parametrize("rotation", [assigned, as_complex], ids=lambda one: one.__name__)
@pytest.mark.parametrize("norm", [norm, norm_by_hand], ids=lambda one: one.__name__)
def test_they_are_one_pass(norm, rotation, heads, dtype):
    found = planned(rotated(norm, rotation), dtype, heads)
    (one,) = found.passes
    assert one.shape == (B, S) and one.program.width == C and "rms_norm" not in found.calls
    if rotation is as_complex and dtype is torch.float32:  # torch rounds once where a product and a sum are one
        torch.testing.assert_close(found.got, found.wanted, rtol=2e-6, atol=2e-6)
    else:
        assert found.equal()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_they_are_one_pass_in_the_kernel(dtype):
    found = planned(rotated(norm, assigned), dtype, kernel=rowwise.triton)
    assert len(found.passes) == 1
    torch.testing.assert_close(found.got, found.wanted, rtol=2e-3 if dtype is torch.float16 else 3e-6, atol=1e-3)


def normed_again(x, cos, sin, w, wide):
    """Each head is normed by itself, too."""
    q = norm(F.linear(x, wide), w).unflatten(-1, (H, D))
    q = assigned(F.layer_norm(q, (D,)), cos, sin).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q)


def taken_twice(x, cos, sin, w, wide):
    """What is normed goes into a product of its own, so it lies in memory anyway."""
    q = norm(F.linear(x, wide), w)
    turned = assigned(q.unflatten(-1, (H, D)), cos, sin).transpose(1, 2)
    return F.scaled_dot_product_attention(turned, turned, turned), F.linear(q, wide)


def put_together(x, cos, sin, w, wide):
    """By a concatenation of tokens, into which passes over heads write."""
    q = norm(F.linear(x, wide), w).unflatten(-1, (H, D))
    q = torch.cat([q[:, :2] * 1, assigned(q, cos, sin)], dim=1).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("forward", "passes"),
    [(rotated(norm, halves), 2), (normed_again, 2), (taken_twice, 2), (put_together, 2)],
    ids=["halves", "normed again", "taken twice", "put together"],
)
def test_others_are_two(forward, passes, dtype):
    found = planned(forward, dtype)
    assert len(found.passes) >= passes and found.equal()
    assert any(one.program.width == D for one in found.passes)
