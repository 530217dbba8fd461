"""Which scores become -inf: those that do in torch, to the bit, also where others are infinite or NaN."""

import pytest
import torch
from accel_kernels import timestamp_rule

pytest.importorskip("triton")
INF, NAN = torch.inf, torch.nan


def agree(scores, begun, suppressed=None, counters=None, **given):
    found, wanted = (
        run(scores, begun, suppressed, counters, **given) for run in (timestamp_rule.triton, timestamp_rule.reference)
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    return wanted


@pytest.mark.parametrize("case", [one for one in timestamp_rule.cases if one.small], ids=lambda one: one.name)
def test_small_cases(case):
    args, given = case.make(torch.device("cpu"), torch.float32)
    assert timestamp_rule.supports(*args, **given) is None
    agree(*args, **given)


@pytest.mark.parametrize("new", [0, 3])
def test_rows_of_infinities_and_nan(new):
    scores = torch.randn(12, 5000, generator=torch.Generator().manual_seed(0))
    scores[:6, 4000:] += 3  # times are likelier
    for row, (place, number) in enumerate([(0, NAN), (3999, INF), (4500, NAN), (4999, INF), (4100, -INF)]):
        scores[row, place] = number
    scores[6], scores[7, :4000], scores[8, 4000:], scores[9] = -INF, -INF, -INF, INF
    given = {"first": 4000, "end": 3990, "initial": None}
    begun = torch.randint(0, 3990, (12, new), generator=torch.Generator().manual_seed(1))
    begun[::2, :1] = 4444
    counters = torch.zeros(12, dtype=torch.int32)
    for one in (scores, scores[:, :4200]):
        wanted = agree(one, begun, None, counters, **given)
        assert not new or {True, False} == {*(wanted[:, :9] == -INF).all(1).tolist()}
    assert not counters.any()
