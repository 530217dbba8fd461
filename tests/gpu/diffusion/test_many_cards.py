"""Diffusion on two cards, by the script that measures it, with tiny models: it compares before it times."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "many_cards_diffusion.py"

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def measured(folder: Path, *arguments: str) -> list[dict]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    done = subprocess.run(
        [*command, "--tiny", "--out", str(folder), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


def test_guidance_runs_on_two_cards_by_graphs(tmp_path):
    (found,) = measured(tmp_path, "sdxl")
    assert found["times one card"]["loop_s"] > 0 and "failed" not in found
    halves = [row for row in found["graphs"] if row["path"] == "unet" and row["inputs"].startswith("1x")]
    assert any(row["status"] == "graph" for row in halves), found["graphs"]


@pytest.mark.parametrize("way", [(), ("--ring",)], ids=["ulysses", "ring"])
def test_the_whole_forward_is_one_graph_with_its_collectives(tmp_path, way):
    (found,) = measured(tmp_path, "flux", *way)
    assert found["accel, 2 cards"]["ms"] > 0 and "failed" not in found
    assert not found["fallbacks"]
    assert [row["status"] for row in found["graphs"]] == ["graph"], found["graphs"]
    launched = {kernel["name"] for kernel in found["profile of a forward"]["kernels"]}
    through_rooms = "exchange_kernel" in launched and not any("SendRecv" in name for name in launched)
    assert through_rooms == (way == ()), launched


def test_heads_are_exchanged_through_rooms_as_by_nccl(tmp_path):
    script, out = SCRIPT.with_name("exchanges_over_cards.py"), tmp_path / "found.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run([*command, str(out)], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads(out.read_text())  # it has compared every number
    assert len(found["rows"]) == 3 and found["one after another"] == {"of": 200, "wrong": 0}
