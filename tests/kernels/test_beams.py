"""Steps of beam search, and the order of a cache's rows, by kernels: what torch finds, with fresh memory poisoned."""

import pytest
import torch
from accel_kernels import BeamTexts, beam_step, reorder_beams

from support.kernels.numbers import poisoned

pytest.importorskip("triton")
CPU = torch.device("cpu")


@pytest.fixture
def fresh(monkeypatch):
    poisoned(monkeypatch)


def agree(args, given):
    """Both find the same; of equals both take the first."""
    assert beam_step.supports(*args, **given) is None
    found, wanted = (
        BeamTexts.unpacked(given["rules"], run(*args, **given)) for run in (beam_step.triton, beam_step.reference)
    )
    for name, mine, other in zip(BeamTexts._fields, found, wanted, strict=True):
        torch.testing.assert_close(
            mine, other, rtol=1e-6, atol=1e-6, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )
    return wanted


@pytest.mark.parametrize("case", [one for one in beam_step.cases if one.small], ids=lambda one: one.name)
@pytest.mark.share(1)
def test_a_step(case, fresh):
    args, given = case.make(CPU, torch.float32)
    assert bool(agree(args, given).over) == (case.name in ("last", "ended"))


@pytest.mark.turns(2)
def test_a_search_to_its_end(fresh):
    """Step by step from what the kernel found: texts end one after the other, and the search with the last."""
    (_, packed), given = next(one for one in beam_step.cases if one.name == "early").make(CPU, torch.float32)
    generator, seen = torch.Generator().manual_seed(3), set()
    packed = BeamTexts.unpacked(given["rules"], packed)._replace(most=torch.tensor([14])).packed()
    for _ in range(5):
        wanted = agree((3 * torch.randn(9, 131, generator=generator), packed), given)
        packed = wanted.packed()
        seen.add(int(wanted.ended.all(1).sum()))
    assert wanted.over and len(seen) > 1


def test_infinities_equals_and_nan(fresh):
    args, given = next(one for one in beam_step.cases if one.name == "last").make(CPU, torch.float32)
    args[0][0, 5:] = -torch.inf
    args[0][4, 7:2000] = -torch.inf
    args[0][5:8] = args[0][5:8].round()
    agree(args, given)
    args[0][4, 7] = torch.nan
    assert agree(args, given).running_scores.isnan().any()


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
