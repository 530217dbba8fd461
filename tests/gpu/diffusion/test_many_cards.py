"""Diffusion on two cards, by the studies that measure it: they compare before they time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def study(*words: str) -> None:
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "benchmarks"]
    done = subprocess.run([sys.executable, *ranks, *words], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def measured(folder: Path, case: str, *words: str) -> dict:
    study("cards-diffusion", "--cases", case, "--out", str(folder), *words)
    (file,) = folder.iterdir()
    found = json.loads(file.read_text())
    assert not found.get("failed"), found["failed"]
    return found


def test_guidance_runs_on_two_cards_by_graphs(tmp_path):
    found = measured(tmp_path, "sdxl")
    assert found["times one card"]["loop_s"] > 0
    halves = [row for row in found["graphs"] if row["path"] == "unet" and row["inputs"].startswith("1x")]
    assert any(row["status"] == "graph" for row in halves), found["graphs"]


@pytest.mark.parametrize("way", [(), ("--ring",)], ids=["ulysses", "ring"])
def test_the_whole_forward_is_one_graph_with_its_collectives(tmp_path, way):
    found = measured(tmp_path, "flux", *way)
    assert found["accel, 2 cards"]["ms"] > 0 and not found["fallbacks"]
    assert [row["status"] for row in found["graphs"]] == ["graph"], found["graphs"]
    launched = {kernel["name"] for kernel in found["profile of a forward"]["kernels"]}
    through_buffers = "exchange_kernel" in launched and not any("SendRecv" in name for name in launched)
    assert through_buffers == (way == ()), launched


def test_heads_are_exchanged_through_receive_buffers_as_by_nccl(tmp_path):
    study("collectives", str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())  # it has compared every number
    assert len(found["rows"]) == 3 and found["one after another"] == {"of": 200, "wrong": 0}
