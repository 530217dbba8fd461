"""Which tile multiplies experts: the likely one until it was timed, and then the fastest that agrees with it."""

import contextlib
import copy
import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accel_kernels import autotune
from accel_kernels.moe import chooser as module
from accel_kernels.moe.chooser import MOST_TIMED, ExpertsChooser, likely_way, possible_ways
from accel_kernels.moe.experts import CASES, experts
from accel_kernels.moe.tiles import DEQUANTIZED, GEMV
from accel_kernels.trials import Trials

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def given(name: str) -> tuple:
    (x, index, _, weights), _ = next(case for case in CASES if case.name == name).make(
        torch.device("cpu"), torch.float32
    )
    return x, index, weights


@pytest.fixture
def timed(monkeypatch):
    """Milliseconds by way, and ways that are wrong; what ran."""
    told = SimpleNamespace(times={}, wrong=set(), ran=[], capturing=False)

    def triton(x, index, shares, weights, *, tile):
        told.ran.append(tile)
        return torch.full_like(x, 2.0 if tile in told.wrong else 1.0)

    monkeypatch.setattr(module, "experts", SimpleNamespace(triton=triton))
    monkeypatch.setattr(autotune, "race", lambda runs: [told.times[run.keywords["tile"]] for run in runs])
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: told.capturing)
    return told


def measured(chooser: ExpertsChooser, *tensors) -> str:
    trials = Trials()
    with trials.noting() as asked:
        first = chooser.choose(*tensors)
    assert trials.work(asked) == []
    assert first == possible_ways(*tensors[1].shape, tensors[2].experts)[0]
    return chooser.choose(*tensors)


def test_the_fastest_is_taken_from_then_on(timed, tmp_path):
    chooser, tensors = ExpertsChooser(tmp_path / "experts.json"), given("grouped")
    assert chooser.choose(*tensors) == "16" and not chooser.choices  # nobody collects trials
    timed.times = {"16": 3.0, "32": 2.0}
    assert measured(chooser, *tensors) == "32" and set(timed.ran) == {"16", "32"}
    x, index, weights = tensors
    assert chooser.choose(x.repeat(2, 1)[:30], index.repeat(2, 1)[:30], weights) == "32"  # up to 32 tokens
    timed.capturing = True
    assert chooser.choose(*tensors) == "32" and chooser.choose(*given("grouped-gpt-oss")) == "16"
    timed.capturing, timed.ran[:] = False, []
    again = pickle.loads(pickle.dumps(copy.deepcopy(chooser)))
    assert not again.choices and measured(again, *tensors) == "32" and not timed.ran  # from the file


@pytest.mark.parametrize(("times", "wrong", "best"), [((3.0, 2.95), set(), "16"), ((3.0, 1.0), {"32"}, "16")])
def test_little_gain_or_other_numbers_change_nothing(timed, times, wrong, best):
    timed.times, timed.wrong = dict(zip(("16", "32"), times, strict=True)), wrong
    assert measured(ExpertsChooser(), *given("grouped")) == best


def test_few_tokens_may_be_grouped_too(timed):
    timed.times = {GEMV: 2.0, "16": 1.0}
    assert measured(ExpertsChooser(), *given("several")) == "16"


def test_what_is_worth_timing():
    assert possible_ways(1, 8, 128) == possible_ways(3, 8, 128) == [GEMV, "16"]
    assert possible_ways(4, 8, 128) == possible_ways(16, 8, 128) == ["16", GEMV]
    assert possible_ways(32, 8, 128) == ["16", "32"]
    assert possible_ways(256, 8, 128) == possible_ways(1536, 8, 128) == ["64", "32", "128", "128/64"]
    assert possible_ways(1537, 8, 128) == ["128/64", "64", "128"]
    assert possible_ways(1537, 8, 128, 4) == ["128", "64", "128/64"]


def test_experts_in_fewer_bits_may_be_written_out_where_many_tokens_choose_each():
    assert possible_ways(32, 8, 128, 1) == ["16", "64"]
    assert possible_ways(1024, 8, 128, 1) == ["64", "16", "128", "128/64"]
    assert possible_ways(2048, 8, 128, 1) == possible_ways(3072, 8, 128, 1) == ["128", "64", "128/64"]
    assert possible_ways(3073, 8, 128, 1) == ["128", "64", "128/64", "written 64", "written 128"]
    assert possible_ways(16385, 8, 128, 1) == ["written 128", "64", "128", "128/64", "written 64"]
    assert [likely_way(tokens, 2, 8, 1) for tokens in (1, 17, 4096, 4097)] == [GEMV, "16", "128", "written 128"]


@pytest.mark.parametrize(
    ("file", "itemsize", "least"),
    [
        ("h200-experts", 2, 1), ("h200-experts-int8", 1, 1), ("h200-experts-four-bits", 1, 1),
        ("h100-experts-mxfp4", 1, MOST_TIMED + 1),
    ],
)  # fmt: skip
def test_the_likely_way_is_what_was_measured_to_be_the_fastest(file, itemsize, least):
    """Or no more than five hundredths slower. What is written out first takes memory, and is only taken when timed.
    least: tokens, as fewer are timed each by itself too.
    """
    found = json.loads((RESULTS / f"nvidia-{file}.json").read_text())
    for row in found.get("experts") or found["rows"]:
        if row["tokens"] < least:
            continue
        chosen, many = (4, 32) if row["model"] == "gpt-oss-20b" else (8, 128)
        likely = likely_way(row["tokens"], chosen, many, itemsize)
        best = min(us for way, us in row["ways"].items() if way not in DEQUANTIZED)
        assert row["ways"][likely] < 1.05 * best, (row["tokens"], likely)


def test_numbers_of_other_kinds_are_chosen_for_by_themselves(timed):
    timed.times = {GEMV: 1.0, "16": 2.0}
    chooser = ExpertsChooser()
    for name in ("int4", "int4-zeros", "int8", "several"):
        measured(chooser, *given(name))
    assert len(chooser.choices) == 4 and len({chooser.place(key).kind for key in chooser.choices}) == 4


def test_on_a_cpu_it_is_the_op():
    args, _ = CASES[0].make(torch.device("cpu"), torch.float32)
    chooser = ExpertsChooser()
    assert torch.equal(chooser(*args), experts(*args)) and chooser.supports(*args) is None
    assert chooser.name == experts.name and chooser.reference is experts.reference
