"""`accel bench batch` on a tiny model: every workload, and what it writes."""

import json

import pytest
import torch
from typer.testing import CliRunner

import accel
from accel.bench.llm import batch
from accel.bench.llm.request import BatchRequest, weights_and_cache
from accel.bench.llm.workloads import WORKLOADS, Workload
from accel.bench.results import WrongResult
from accel.commands.app import app

CPU = torch.device("cpu")


@pytest.fixture
def fused(monkeypatch):
    """Batched by accel on a CPU too; and stock's manager does not look through all objects of the tests."""
    monkeypatch.setattr("gc.collect", lambda *_: 0)
    optimize = accel.optimize
    monkeypatch.setattr(accel, "optimize", lambda model, **more: optimize(model, **({"cpu": "fuse"} | more)))


@pytest.fixture
def request_(monkeypatch):
    monkeypatch.setattr(batch, "CALLS", 2)
    monkeypatch.setattr(batch, "WARM", 1)
    monkeypatch.setattr(batch, "CHECKED", (2, 4))
    few = tuple(one.first(3) for one in WORKLOADS)
    monkeypatch.setattr(batch, "WORKLOADS", few)
    chosen = ("different lengths", "shared prompt")
    return BatchRequest("tiny", chosen, ("int8", "int8"), 40, 0.1, 60.0)


OPTIONS = ["bench", "batch", "--model", "tiny", "--stock-seconds", "0.1"]


def test_the_command_measures_stock_beside_accel(fused, request_, tmp_path, monkeypatch):
    bench, kept = batch.bench_batches, []

    def watched(request, device, dtype, stage, keep):
        assert request == request_
        return bench(request, device, dtype, stage, lambda now: kept.append(now) or keep(now))

    monkeypatch.setattr(batch, "bench_batches", watched)
    options = ["--workloads", ",".join(request_.workloads), "--lossy", "int8,int8", "--seconds", "60"]
    options += ["--most-tokens", "40", "--device", "cpu", "--out", str(tmp_path)]
    shown = CliRunner().invoke(app, [*OPTIONS, *options])
    assert shown.exit_code == 0, shown.output
    [written] = tmp_path.glob("*.json")
    assert written.name == "cpu-batch-tiny.json"
    result = json.loads(written.read_text())
    assert result["failed"] == [] and result["skipped"] == []
    assert [row["workload"] for row in result["rows"]] == ["different lengths", "shared prompt"]
    for row in result["rows"]:
        assert all(row[name]["tok_s"] > 0 for name in ("stock", "accel", "accel int8, kv int8"))
    assert result["worst_margin"] <= result["margin_allowed"]
    assert result["calls"]["accel"]["one_token_ms"] > 0
    assert json.loads(json.dumps(kept[-1])) | {"took_s": 0} == result | {"took_s": 0}
    assert not [row for row in result["fallbacks"] if "generate_batch" in row[1]]  # our manager ran


def test_a_wrong_token_is_found(fused, request_, monkeypatch):
    monkeypatch.setattr(batch, "answers", lambda model, prompts, new: [[7] * new for _ in prompts])
    with pytest.raises(WrongResult, match="standard deviations below stock's best one"):
        batch.bench_batches(request_, CPU, torch.float32)


def test_prompts():
    class Model:
        class config:
            @staticmethod
            def get_text_config():
                return type("config", (), {"vocab_size": 50})

    one = Workload("x", 5, 10, 20, 4, shared=8)
    prompts = one.prompts(Model)
    assert all(10 <= len(prompt) <= 20 and prompt[:8] == prompts[0][:8] for prompt in prompts)
    assert one.first(2).prompts(Model) == prompts[:2]
    scaled = one.scaled(12)
    assert scaled.longest + scaled.new <= 12 and scaled.shared == 4


def test_nothing_that_loses_may_be_asked_for():
    assert weights_and_cache("none") == () and weights_and_cache("int8,fp8") == ("int8", "fp8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "nothing"], "neither a folder nor one of"),
        (["--model", "tiny", "--workloads", "x"], "'x' is none of different lengths"),
        (["--model", "tiny", "--lossy", "int8"], "or none"),
    ],
)
def test_wrong_options(options, message):
    result = CliRunner().invoke(app, ["bench", "batch", *options])
    assert result.exit_code == 2 and message in " ".join(result.output.split()).replace("│ ", "").replace(" │", "")
