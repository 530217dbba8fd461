"""Steps of beam search, and the order of a cache's rows, by kernels: what torch finds, with fresh memory poisoned."""

import pytest
import torch
from accel_kernels import beam_step, reorder_beams
from accel_kernels.beams.beam_step import NEVER, BeamTexts

from support.kernels.numbers import poisoned

pytest.importorskip("triton")
CPU = torch.device("cpu")


@pytest.fixture
def fresh(monkeypatch):
    poisoned(monkeypatch)


def texts_of(result, rules):
    return BeamTexts.unpacked(rules, *result[:2])


def agree(args, given):
    """Both find the same; of sequences that have not ended, and are never to be given, nothing is asked."""
    assert beam_step.supports(*args, **given) is None
    found, wanted = (run(*args, **given) for run in (beam_step.triton, beam_step.reference))
    ours, theirs = (texts_of(one, given["rules"]) for one in (found, wanted))
    known = {"running": theirs.running_scores > NEVER / 2, "": theirs.ended}
    for name, mine, other in zip(BeamTexts._fields, ours, theirs, strict=True):
        rows = known["running" if name.startswith("running") else ""]
        if mine.shape[:2] == rows.shape:
            mine, other = (one[rows] for one in (mine, other))
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    rows = known["running"].flatten()
    assert torch.equal(found[2][rows], wanted[2][rows]) and torch.equal(found[3][rows], wanted[3][rows])
    assert bool(found[4]) == bool(wanted[4])
    return theirs, bool(wanted[4])


@pytest.mark.parametrize("case", [one for one in beam_step.cases if one.small], ids=lambda one: one.name)
@pytest.mark.share(1)
def test_a_step(case, fresh):
    args, given = case.make(CPU, torch.float32)
    _, over = agree(args, given)
    assert over == (case.name in ("last", "ended"))


def test_a_search_to_its_end(fresh):
    """Step by step from what the kernel found: texts end one after the other, and the search with the last."""
    args, given = next(one for one in beam_step.cases if one.name == "early").make(CPU, torch.float32)
    generator, (_, *state, bounds, factors), seen = torch.Generator().manual_seed(3), args, set()
    bounds[1] = 14
    for _ in range(6):
        logits = 3 * torch.randn(9, 131, generator=generator)
        theirs, over = agree((logits, *state, bounds, factors), given)
        state = list(beam_step.triton(logits, *state, bounds, factors, **given)[:2])
        seen.add(int(theirs.ended.all(1).sum()))
        if over:
            break
    assert over and len(seen) > 1


def test_infinities_and_nan(fresh):
    args, given = next(one for one in beam_step.cases if one.name == "last").make(CPU, torch.float32)
    args[0][0, 5:] = -torch.inf
    args[0][4, 7:2000] = -torch.inf
    agree(args, given)
    args[0][4, 7] = torch.nan
    found, wanted = (run(*args, **given) for run in (beam_step.triton, beam_step.reference))
    assert torch.equal(found[1].isnan(), wanted[1].isnan()) and found[1].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [one for one in reorder_beams.cases if one.small], ids=lambda one: one.name)
@pytest.mark.share(1)
def test_rows_of_a_cache(case, dtype):
    (kept, order, length), given = case.make(CPU, dtype)
    assert reorder_beams.supports(kept, order, length, **given) is None
    for less in (0, 1):
        used = length - less
        mine, other = (
            run(kept.clone(), order, used, **given) for run in (reorder_beams.triton, reorder_beams.reference)
        )
        assert torch.equal(mine[:, :, : int(used)], other[:, :, : int(used)])
        assert torch.equal(mine[:, :, int(used) :], kept[:, :, int(used) :])
