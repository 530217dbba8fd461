"""Whole runs of `accel bench llm`: the file they write, quantized variants, and what happens when something fails."""

import json
from pathlib import Path

import pytest
import torch

from accel import api
from accel.bench.llm import cases, runner, single_calls
from accel.bench.llm.request import PARTS, LlmRequest
from support.command_line import run_command
from support.everything import EVERYTHING

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


def bench(tmp_path, *arguments):
    sizes = ("--batch", "1,3", "--new-tokens", "3", "--device", "cpu", "--out", tmp_path)
    return run_command("bench", "llm", "--model", "tiny", *sizes, *arguments)


def long_steps(monkeypatch, step=1e-3):
    """On a busy host the difference of two calls may come out below zero; it does not with this."""
    steps = cases.Work.steps
    monkeypatch.setattr(cases.Work, "steps", lambda *args, **options: steps(*args, **options) | {"step": step})
    speed = cases.speed  # from a long past, too
    monkeypatch.setattr(cases, "speed", lambda rows, median, one: speed(rows, median | {"step": step}, one))


def test_a_whole_run(tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "PROMPTS", (64,))
    monkeypatch.setattr(cases, "MOST_ROUNDS", 2)
    long_steps(monkeypatch)
    monkeypatch.setattr(single_calls, "CALLS", ((1, 7, 4), (3, 20, 4), (1, 2040, 40)))
    parts = ",".join(part for part in PARTS if part != "ready")
    result = bench(
        tmp_path, "--context", "32,2100,64", "--long", "150", "--long-batch", "1,2", "--parts", parts, "--compile"
    )
    assert result.exit_code == 0, result.output
    assert all(word in result.output for word in ("decode", "prefill", "speed-up", "first or second call", "of bound"))
    figures = json.loads((tmp_path / "cpu-llm-tiny.json").read_text())
    assert figures["case"] == "llm-tiny" and figures["dtype"] == "float32" and figures["machine"]["gpu"] is None
    assert {"commit", "date", "sites", "graphs", "fallbacks", "copy_bandwidth_gb_s"} <= set(figures)
    assert figures["quality"]["passed"] and figures["quality"]["agreement"]["tokens"] == 32
    assert figures["restored_bit_equal"] is True and figures["sizes"]["parameters"] == 34976

    parts = figures["parts"]
    decode = parts["decode"]
    assert [(row["batch"], row["context"]) for row in decode] == [(1, 32), (3, 32), (1, 2100), (1, 64)]
    assert [set(row) & {"stock", "accel", "compile"} for row in decode] == [
        {"stock", "accel", "compile"}, {"stock", "accel", "compile"}, set(), {"stock", "accel"}
    ]  # fmt: skip
    for row in (*decode[:2], decode[3], *parts["long"]):
        assert row["accel"]["tok_s"] > 0 and 0 < row["accel"]["share_of_bandwidth"] < 1
    assert [row["tokens"] for row in parts["prefill"]] == [64]
    assert [row["mode"] for row in parts["modes"]] == list(cases.MODES)
    assert all({"stock", "accel"} <= set(row) for row in parts["modes"])
    assert [(row["batch"], row["context"]) for row in parts["long"]] == [(1, 150), (2, 150)]
    assert [row["batch"] for row in parts["memory"]] == [1, 3] and parts["memory"][0]["accel"] is None
    assert [row["variant"] for row in parts["stalls"]] == ["stock", "accel"]
    assert all([call["context"] for call in row["calls"]] == [7, 20] for row in parts["stalls"])

    assert {(row["case"], row["variant"]) for row in figures["failed"]} == {
        ("batch 1, context 2100, new tokens 3", "stock"), ("batch 1, context 2100, new tokens 3", "accel")
    }  # fmt: skip
    assert all("2048 positions" in row["reason"] for row in figures["failed"]) and "failed: decode" in result.output
    assert figures["skipped"] == []


@pytest.mark.skipif(not EVERYTHING, reason="seconds of work; ACCEL_TEST_EVERYTHING=1 runs it")
def test_what_loses_beside(tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "PROMPTS", (64,))
    monkeypatch.setattr(cases, "MOST_ROUNDS", 2)
    long_steps(monkeypatch)
    monkeypatch.setattr(runner, "copy_bandwidth", lambda device: 1e9)  # shares are rounded: not to nothing
    more = ("--context", "32", "--parts", "decode", "--weights", "int8,int8-head,int4-g32")
    result = bench(tmp_path, *more, "--activations", "int8", "--kv-cache", "int8")
    assert result.exit_code == 0, result.output
    assert "s to quantize" in result.output and "accel int8" in result.output
    figures = json.loads((tmp_path / "cpu-quantized-tiny.json").read_text())
    names = ["int8", "int8-head", "int4-g32", "int8 x int8"]
    names += ["kv int8", *(f"{name}, kv int8" for name in names)]
    told = figures["quantized"]
    assert list(told) == names
    for row in figures["parts"]["decode"]:
        assert {"stock", "accel", *(f"accel {name}" for name in names)} <= set(row)
    assert told["int8"]["mb"] < told["int8"]["mb_before"] / 2 and told["int4-g32"]["mb"] < told["int8"]["mb"]
    assert 30 < told["int8"]["sqnr_db"] and 10 < told["int4-g32"]["sqnr_db"] < told["int8"]["sqnr_db"]
    assert 0 < told["int8"]["kl"] < told["int4-g32"]["kl"] and 0.9 < told["int8"]["top1"] <= 1
    assert told["int8"]["kl"] < told["int8 x int8"]["kl"] and told["int8 x int8"]["mb"] == told["int8"]["mb"]
    row = figures["parts"]["decode"][0]  # at one time a step, the shares are as the bytes
    shares = {name: of["share_of_bandwidth"] for name, of in row.items() if isinstance(of, dict)}
    assert 0 < shares["accel int4-g32"] < shares["accel int8"] < shares["accel"] == shares["stock"]
    assert 0 < shares["accel int8-head"] < shares["accel int8"] == shares["accel int8 x int8"]
    cache = told["kv int8"]  # two layers, two heads of 8: a byte each and a float32 for all, not 4 each
    assert (cache["token_bytes"], cache["token_bytes_before"]) == (2 * 2 * 2 * 12, 2 * 2 * 2 * 32)
    assert 0 < cache["kl"] < 1e-3 and "mb" not in cache


def test_out_of_time_nothing_new_is_begun(tmp_path):
    result = bench(tmp_path, "--context", "32", "--seconds", "0.1")
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "cpu-llm-tiny.json").read_text())
    assert figures["parts"] == {} and figures["quality"]["passed"]
    assert [row["part"] for row in figures["skipped"]] == list(PARTS)
    assert "left out: decode" in result.output


class Killed(BaseException):
    """A limit of time ends a process without asking; here this does, which nothing waits for."""


@pytest.mark.parametrize("how", [KeyboardInterrupt, Killed])
def test_a_run_that_is_ended_leaves_what_it_had(tmp_path, monkeypatch, how):
    def ended(work):
        raise how

    monkeypatch.setitem(runner.IN_TURNS, "prefill", ended)
    monkeypatch.setattr(cases, "MOST_ROUNDS", 2)
    long_steps(monkeypatch)
    more = ("--context", "32", "--parts", "decode,prefill,modes,ready", "--weights", "int8,int4")
    if how is Killed:
        with pytest.raises(Killed):
            bench(tmp_path, *more)
    else:
        assert bench(tmp_path, *more).exit_code == 0
    figures = json.loads((tmp_path / "cpu-quantized-tiny.json").read_text())
    row, _ = figures["parts"]["decode"]
    assert {"stock", "accel", "accel int8"} <= set(row) and list(figures["quantized"]) == ["int8"]
    (failed,) = figures["failed"]  # 32 inputs are no multiple of 128
    assert (failed["part"], failed["variant"]) == ("quantizing", "int4") and "no linear layer" in failed["reason"]
    told = [{"part": "ready", "case": "", "reason": "interrupted"}] if how is KeyboardInterrupt else []
    assert figures["skipped"] == told and list(figures["parts"]) == ["decode"]


def test_parts_keep_time_for_those_after_them():
    request = LlmRequest("tiny", parts=("decode", "stalls", "ready"), seconds=100.0)
    going = runner.GenerateRun(request, CPU, torch.float32)
    going.clock.start -= 79
    assert not going.out_of_time("decode")
    going.clock.start -= 2
    assert going.out_of_time("decode") and not going.out_of_time("stalls") and not going.out_of_time("ready")
    going.clock.start -= 10
    assert going.out_of_time("stalls") and not going.out_of_time("ready")


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
    assert result.exit_code == 1 and "wrong result" in result.output and "nothing was timed" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--model", "llama-9b"), "'llama-9b' is neither a folder nor one of llama-8b"),
        (("--model", "tiny", "--parts", "decode,encode"), "'encode' is none of decode"),
        (("--model", "tiny", "--batch", "1,x"), "give numbers with commas"),
        (("--model", "tiny", "--weights", "int8,int3"), "'int3' is none of int8"),
        (("--model", "tiny", "--kv-cache", "int4"), "'int4' is none of int8, fp8"),
        (("--model", "tiny", "--activations", "int4"), "'int4' is none of int8"),
        (("--model", ROOT / "examples/models/tiny-sd-digits/text_encoder"), "no causal language model"),
    ],
    ids=str,
)
def test_it_refuses(arguments, message, tmp_path):
    result = run_command("bench", "llm", *arguments, "--device", "cpu", "--out", tmp_path)
    assert result.exit_code == 2 and message in " ".join(result.output.replace("│", " ").split())


def test_a_step_that_takes_no_time_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "MOST_ROUNDS", 2)
    long_steps(monkeypatch, step=-1e-6)
    result = bench(tmp_path, "--context", "32", "--parts", "decode")
    assert result.exit_code == 0, result.output
    assert result.output.count("calls that wrote more tokens took no longer") >= 2
    figures = json.loads((tmp_path / "cpu-llm-tiny.json").read_text())
    assert not any({"stock", "accel"} & set(row) for row in figures["parts"]["decode"])
