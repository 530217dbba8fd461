"""`accel bench llm`: what it takes for the time of a step and until ready, the file it writes, and what fails."""

import json
import time
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
import torch

from accel import api
from accel.bench import timing
from accel.bench.llm import generate
from accel.bench.ready import process, states
from accel.bench.ready.parts import PARTS
from support.command_line import run_command
from support.everything import EVERYTHING

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


def bench(tmp_path, *arguments):
    given = ("--batch", "1,3", "--new-tokens", "3", "--budget", "0.05", "--device", "cpu", "--out", tmp_path)
    return run_command("bench", "llm", "--model", "tiny", *given, *arguments)


@pytest.mark.parametrize(
    ("options", "loses"), [((), False), (("--weights", "int8", "--activations", "int8", "--kv-cache", "int8"), True)]
)
@pytest.mark.turns(2)
def test_a_whole_run(tmp_path, monkeypatch, options, loses):
    monkeypatch.setattr(generate, "PROMPT", 64)
    steps = generate._in_turns  # on a busy host the difference of two calls may come out below zero

    def positive(*given):
        return {name: [abs(median) + 1e-6 for median in medians] for name, medians in steps(*given).items()}

    monkeypatch.setattr(generate, "_in_turns", positive)
    result = bench(tmp_path, "--context", "32,2100,64", *options)
    assert result.exit_code == 1 and "2048 positions" in result.output and "ms a step" in result.output
    figures = json.loads((tmp_path / "cpu-llm.json").read_text())
    assert figures["dtype"] == "float32" and figures["machine"]["gpu"] is None and {"commit", "date"} <= set(figures)
    (row,) = figures["rows"]
    assert row["quality"]["passed"] and row["restored_bit_equal"] is True and row["sites"] and not row["fallbacks"]
    assert (row["quality"]["lossy"] is not None) == loses and row.get("weights") == ("int8" if loses else None)
    failing = "batch 1, context 2100"
    calls = ["batch 1, context 32", "batch 3, context 32", failing, "batch 1, context 64", "prompt of 64"]
    assert list(row["llm"]) == calls and list(row["llm"].pop(failing)) == ["failed"]
    assert all(one[way]["call_ms"] > 0 for one in row["llm"].values() for way in ("stock", "accel"))
    assert row["llm"]["batch 3, context 32"]["accel"]["tok_s"] > 0


def test_no_figure_for_a_wrong_result(tmp_path, monkeypatch):
    plan = api.plan_for

    def wrong(part, context):
        made = plan(part, context)
        if not made.patches:
            made.patches = []
        made.apply = lambda: setattr(
            part.lm_head, "forward", lambda x: 1.01 * torch.nn.functional.linear(x, part.lm_head.weight)
        )
        made.undo = lambda: vars(part.lm_head).pop("forward", None)
        return made

    monkeypatch.setattr(api, "plan_for", wrong)
    result = bench(tmp_path, "--context", "32")
    assert result.exit_code == 1 and "nothing was timed" in result.output
    assert "llm" not in json.loads((tmp_path / "cpu-llm.json").read_text())["rows"][0]


@pytest.mark.parametrize(
    "code, arguments, message",
    [
        (2, ("--model", "llama-9b"), "'llama-9b' is no model of"),
        (2, ("--model", "tiny", "--batch", "1,x"), "give whole numbers"),
        (2, ("--model", "tiny", "--weights", "int3"), "int3"),
        (2, ("--model", "tiny", "--kv-cache", "int4"), "int4"),
        (1, ("--model", ROOT / "examples/models/tiny-sd-digits/text_encoder"), "no causal language model"),
    ],
    ids=str,
)
def test_it_refuses(code, arguments, message, tmp_path):
    result = run_command("bench", "llm", *arguments, "--device", "cpu", "--out", tmp_path)
    assert result.exit_code == code and message in " ".join(result.output.replace("│", " ").split())


def test_a_step_is_the_difference_of_two_calls(tiny, monkeypatch):
    """A model whose calls cost 30 ms, and 1 ms a token; and one whose tokens take no time."""
    now, each = [0.0], 0.001
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def called(input_ids, attention_mask, max_new_tokens, do_sample):
        now[0] += 0.03 + each * max_new_tokens
        return torch.zeros(input_ids.shape[0], input_ids.shape[1] + max_new_tokens)

    monkeypatch.setattr(tiny, "generate", called)
    found = generate.decode_steps({"slow": tiny}, 2, 16, 40, 0.3)["slow"]
    assert found["ms_step"] == pytest.approx(1.0) and found["tok_s"] == pytest.approx(2e3, rel=1e-2)
    assert found["call_ms"] == pytest.approx(30 + 45)
    each = 0.0
    with pytest.raises(ValueError, match="took no longer"):
        generate.decode_steps({"slow": tiny}, 2, 16, 40, 0.3)


def test_stopping_early_is_no_time():
    stopping = SimpleNamespace(generate=lambda input_ids, **kwargs: torch.zeros(1, 9))
    with pytest.raises(ValueError, match="stopped after 5 of 7 tokens"):
        generate._generate(stopping, {"input_ids": torch.zeros(1, 4)}, 7)


def test_one_that_fails_leaves_the_others():
    def bad():
        raise RuntimeError("too bad")

    failures = []
    samples = {"bad": bad, "good": lambda: 1.0}
    found = timing.take_turns(samples, clock=timing.Clock(0.01), fail=lambda *told: failures.append(told))
    assert list(found) == ["good"] and [(name, str(error)) for name, error in failures] == [("bad", "too bad")]
    assert len(found["good"]) >= timing.LEAST_ROUNDS


def test_a_limit_of_time_is_kept():
    with pytest.raises(TimeoutError, match=r"0\.05 s"), timing.within(0.05):
        time.sleep(60)  # which nothing but the limit ends with this error
    with timing.within(0.05):
        pass
    time.sleep(0.1)  # nothing is left to go off


def test_the_functions_whose_seconds_are_told_exist():
    assert all(callable(resolve_name(place)) for place in chain(*PARTS.values()))


def test_ready_in_this_process_and_in_a_fresh_one():
    here = process.measure("tiny", "warm", CPU, torch.float32)
    assert here["optimize_s"] > 0 and here["parts_of_optimize"]["analysis_s"] > 0 and here["fallbacks"] == 0
    if EVERYTHING:
        rows = states.measure_states("tiny", CPU, torch.float32, ("warm", "stock"))
        assert set(rows["warm"]) == set(here) | {"over_stock_s"} and rows["stock"]["ready_s"] > 0
