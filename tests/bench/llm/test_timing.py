"""What `accel bench llm` takes for the time of a step, of a call and until ready."""

from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
import torch

from accel.bench import timing
from accel.bench.llm import cases
from accel.bench.llm.traffic import Traffic, copy_bandwidth
from accel.bench.llm.variants import Variant
from accel.bench.ready import process, states
from accel.bench.ready.parts import PARTS
from accel.libraries.cache import generating_cache
from support.everything import EVERYTHING

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


def test_a_step_is_the_difference_of_two_calls(tiny, monkeypatch):
    """A model whose calls cost 30 ms, and 1 ms a token."""
    work = cases.Work(tiny, Traffic.of(tiny), copy_bandwidth(CPU), CPU, (2,), (16,), 40, 0)
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def generate(input_ids, attention_mask, max_new_tokens, do_sample):
        now[0] += 0.03 + 0.001 * max_new_tokens
        return torch.zeros(input_ids.shape[0], input_ids.shape[1] + max_new_tokens)

    (case,) = cases.decode(work)
    variant = Variant("slow", SimpleNamespace(generate=generate))
    found = cases.interleaved(case, [variant], CPU, 0.3, lambda error, variant: pytest.fail(str(error)))["slow"]
    assert found["ms_step"] == pytest.approx(1.0)
    assert found["tok_s"] == pytest.approx(2e3 / found["ms_step"], rel=1e-2)
    assert found["call_ms"] == pytest.approx(30 + 45) and found["first_s"] > 0.03 and found["rounds"] >= 2


def test_steps_of_many_rows_go_on_from_a_prompt_computed_before(tiny, monkeypatch):
    """Calls with the prompt in them are none of those whose difference is taken."""
    work = cases.Work(tiny, Traffic.of(tiny), copy_bandwidth(CPU), CPU, (3, 5), (8,), 4, 0)
    monkeypatch.setattr(cases, "MOST_PROMPT", 30)
    asked = []

    def generate(input_ids, **more):
        cache = generating_cache(more)
        stored = 0 if cache is None else cache.get_seq_length()
        asked.append((len(input_ids), input_ids.shape[1] - stored))
        return tiny.generate(input_ids, **more)

    few, many = cases.decode(work)
    assert "prompt" not in few.about and many.about["prompt"] == "computed before"
    assert few.compiled and not many.compiled
    sample = many.prepare(Variant("tiny", SimpleNamespace(generate=generate)))
    for _ in range(2):
        found = sample()
        assert found.keys() == {"call", "step"} and asked == [(5, 8), (5, 1), (5, 1)]
        asked.clear()


def test_stopping_early_is_no_time():
    generate = SimpleNamespace(generate=lambda input_ids, **kwargs: torch.zeros(1, 9))
    with pytest.raises(ValueError, match="stopped after 5 of 7 tokens"):
        Variant("short", generate).generate({"input_ids": torch.zeros(1, 4)}, 7)


@pytest.mark.parametrize("failing", ["prepare", "first", "later"])
def test_one_that_fails_leaves_the_others(failing):
    calls = []

    def prepare(variant):
        def sample():
            calls.append(variant.name)
            if variant.name == "bad" and failing != "prepare" and (failing == "first" or calls.count("bad") > 2):
                raise RuntimeError("too bad")
            return {"x": float(len(calls))}

        if variant.name == "bad" and failing == "prepare":
            raise RuntimeError("too bad")
        return sample

    failures = []
    case = cases.TimedCase("part", {"batch": 1}, prepare, lambda median, variant: median)
    variants = [Variant("bad", None), Variant("good", None)]
    found = cases.interleaved(case, variants, CPU, 0.01, lambda error, variant: failures.append((variant, str(error))))
    assert list(found) == ["good"] and failures == [("bad", "too bad")]
    assert found["good"]["rounds"] >= timing.LEAST_ROUNDS


def test_the_functions_whose_seconds_are_told_exist():
    assert all(callable(resolve_name(place)) for place in chain(*PARTS.values()))


def test_ready_in_this_process_and_in_a_fresh_one():
    here = process.measure("tiny", "warm", CPU, torch.float32, tokens=16)
    assert here["optimize_s"] > 0 and here["parts_of_optimize"]["analysis_s"] > 0 and here["fallbacks"] == 0
    if EVERYTHING:
        rows = states.measure_states("tiny", CPU, torch.float32, ("warm", "stock"))
        assert set(rows["warm"]) == set(here) | {"over_stock_s"} and rows["stock"]["ready_s"] > 0
