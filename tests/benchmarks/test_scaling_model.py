"""`python -m benchmarks scaling`: its arithmetic, and that it invents nothing."""

import json
from pathlib import Path

import pytest

from benchmarks.cards import scaling

ROOT = Path(__file__).parents[2]


@pytest.fixture
def links():
    ways = {
        "nccl": {"2": {"8192": 12.0, "1000000": 20.0}, "4": {"8192": 16.0, "1000000": 30.0}},
        "two-shot": {"2": {"8192": 6.0}, "4": {"8192": 7.0}},
    }
    return scaling.Links({"all_reduce_us": ways})


def test_the_fastest_way_of_each_size_counts(links):
    assert links.all_reduce(2, 8192) == 0.006 and links.all_reduce(4, 1e6) == 0.03
    assert links.all_reduce(2, 100) == 0.006  # what is smaller takes as long
    assert links.all_reduce(2, (8192 + 1e6) / 2) == pytest.approx(0.013)
    assert links.all_reduce(2, 2e6 - 8192) == pytest.approx(0.034)
    assert links.all_reduce(8, 8192) == pytest.approx(0.008)
    assert links.all_reduce(1, 8192) == 0
    with pytest.raises(ValueError, match="cards=3: all-reduces are known of 1, 2, 4 and 8"):
        links.all_reduce(3, 8192)


def test_cards_divide_what_is_read_and_nothing_else(links):
    step = scaling.Step(batch=1, before=512, reading=4.0, rest=0.5, size=8192, layers=10)
    assert [step.on(cards, links) for cards in (1, 2, 4)] == pytest.approx([4.5, 2.62, 1.64])
    lines = list(scaling.table([step], links, [{"gpus": 4, "batch": 1, "before": 512, "ms": 1.7}]))
    assert [line.split(" | ")[-1] for line in lines[2:]] == ["4.50 |", "- |", "1.70 |", "- |"]  # not measured: a dash
    pays, within, apart = scaling.most_across_hosts(step, links)
    assert pays == pytest.approx(8 + 250 / 20) and within == pytest.approx(8) and apart == pytest.approx(0.16384)


def test_one_cards_time_is_what_was_measured(links):
    one = json.loads((ROOT / "benchmarks" / "results" / "nvidia-h200-llm-llama-8b.json").read_text())
    told = {(row["batch"], row["context"]): row["accel"]["ms_step"] for row in one["parts"]["decode"]}
    steps = list(scaling.decoding("llama-8b", one))
    assert {(step.batch, step.before): step.on(1, links) for step in steps} == pytest.approx(told)
    assert all(step.size == step.batch * 8192 and step.layers == 32 and step.rest > 0 for step in steps)


def test_what_was_measured_on_several_cards_is_found():
    row = {"model": "llama-8b", "accel": {"off_from_stock": 0.0}}
    row["accel"] |= {"rows 1": {"step_ms": 1.7}, "rows 32": {"step_ms": 3.1}, "prompt": {"prompt_ms": 17.0}}
    failed, other = {"model": "llama-8b", "failed": "why"}, {"model": "llama-3b", "accel": {"rows 1": {"step_ms": 9.0}}}
    result = {"case": "many-cards-text", "ranks": 4, "machine": {"gpu": "X"}, "models": [row, failed, other]}
    others = (result | {"machine": {"gpu": gpu}} for gpu in (None, "Y"))
    found = list(scaling.on_several_cards("llama-8b", [{"case": "sd15"}, result, *others], "X"))
    assert [(one["gpus"], one["batch"], one["before"], one["ms"], one["kind"]) for one in found] == [
        (4, 1, 512, 1.7, "rows"), (4, 32, 512, 3.1, "rows"), (4, 1, 2048, 17.0, "prompt"),
    ]  # fmt: skip
