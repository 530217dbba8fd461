"""What errors of logits mean for tokens: figures against slow and obvious ways to compute them, and the verdict."""

import dataclasses
import json
import math

import pytest
import torch

from accel.verification.agreement import CHUNK, Agreement, distributions, first_differences
from accel.verification.metrics import Quality, compare


def slow_kl(stock: list[float], ours: list[float]) -> float:
    p, q = ([math.exp(x) / sum(map(math.exp, logits)) for x in logits] for logits in (stock, ours))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


def test_divergence_is_the_formula_over_more_positions_than_a_chunk():
    stock = torch.randn(CHUNK + 7, 11)
    ours = stock + 0.3 * torch.randn(CHUNK + 7, 11)
    wanted = [slow_kl(a, b) for a, b in zip(stock.double().tolist(), ours.double().tolist(), strict=True)]
    mean, worst, top1 = distributions(stock, ours)
    assert mean == pytest.approx(sum(wanted) / len(wanted), rel=1e-9)
    assert worst == pytest.approx(max(wanted), rel=1e-9)
    assert top1 == pytest.approx((stock.argmax(-1) == ours.argmax(-1)).double().mean().item())


def test_equal_logits_do_not_diverge_and_forbidden_tokens_have_no_weight():
    logits = torch.randn(3, 5)
    logits[:, 2] = -torch.inf
    assert distributions(logits, logits.clone()) == (0.0, 0.0, 1.0)


def test_tokens_count_up_to_a_rows_first_difference():
    stock = torch.tensor([[1, 2, 3], [1, 2, 0], [3, 0, 0]])
    ours = torch.tensor([[1, 2, 3], [1, 3, 0], [2, 0, 0]])
    logits = torch.zeros(3, 3, 4)
    logits[1, 1] = torch.tensor([0.0, 0.0, 2.0, 1.75])
    logits[2, 0] = torch.tensor([0.0, 0.0, 1.0, 1.5])
    assert first_differences(stock, ours, logits) == (3 + 1 + 0, 0.5)
    assert first_differences(stock, stock, logits) == (9, None)


SAME = Agreement(kl=1e-9, worst_kl=1e-8, top1=1.0, positions=40, equal=32, tokens=32)


def test_text_may_part_where_stock_hardly_preferred_its_own_token():
    assert SAME.failure is None
    near = dataclasses.replace(SAME, equal=20, margin=0.01, margin_allowed=0.02)
    assert near.failure is None
    far = dataclasses.replace(near, margin=0.03)
    assert "stock preferred its own token by 3.0e-02" in far.failure
    assert dataclasses.replace(near, margin=math.nan).failure is not None


def test_quality_fails_with_its_tokens_and_tells_them():
    good = Quality(1e-3, 1e-3, 60.0, True, error=1e-3, allowed=2e-3, measure="relative RMS")
    whole = dataclasses.replace(compare(torch.ones(2), torch.ones(2)), parts={"prompt": good}, agreement=SAME)
    assert whole.passed
    assert all(words in str(whole) for words in ("KL 1.0e-09 nats", "32 of 32 tokens equal", "prompt"))
    assert "SSIM" not in str(whole)
    assert json.loads(json.dumps(whole.to_dict()))["agreement"]["top1"] == 1.0
    far = dataclasses.replace(whole, agreement=dataclasses.replace(SAME, margin=1.0, margin_allowed=0.1))
    assert not far.passed and far.verdict.startswith("FAILED: greedy text differs")
