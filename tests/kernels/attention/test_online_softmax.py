"""Scores behind a softcap, element by element: those near 0 are as exact as torch's."""

import math

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from accel_kernels.attention.paged import decode_triton, paged_attention
from accel_kernels.attention.paged.online_softmax_triton import capped


@triton.jit
def capped_kernel(x_ptr, y_ptr, softcap, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, capped(tl.load(x_ptr + at), softcap))


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter")
@pytest.mark.parametrize("softcap", [5.0, 30.0, 50.0])
def test_a_softcap_is_as_exact_as_torchs(softcap):
    sizes = softcap * torch.logspace(-5, 1.5, 512, dtype=torch.float64)
    scores = torch.cat((sizes, -sizes)).float()
    ours = torch.full_like(scores, math.nan)
    capped_kernel[(1,)](scores, ours, softcap, SIZE=len(scores))
    truth = softcap * torch.tanh(scores.double() / softcap) * math.log2(math.e)  # the kernels' scores are in base 2
    theirs = softcap * torch.tanh(scores / softcap) * math.log2(math.e)
    error, allowed = (float(((t.double() - truth) / truth).abs().max()) for t in (ours, theirs))
    assert error <= 2 * allowed, f"{error:.1e}, torch's own {allowed:.1e}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter")
@pytest.mark.parametrize("shares", [4, 13])
def test_few_and_many_shares_are_put_together(monkeypatch, shares):
    """Up to `FEW_SPLITS` and more, which have code of their own; an interpreter has no processors for so many."""
    monkeypatch.setattr(decode_triton, "split_count", lambda *_: shares)
    case = next(case for case in paged_attention.CASES if case.name == "decode-many-shares")
    (args, kwargs), (same, _) = (case.make(torch.device("cpu"), torch.float32) for _ in range(2))
    torch.testing.assert_close(decode_triton.decode(*args, **kwargs), paged_attention.reference(*same, **kwargs))
