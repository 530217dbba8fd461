"""On this GPU: configurations of other cards, a kernel that does not fit, and what `accel doctor` finds."""

import dataclasses
import importlib
import os
import subprocess
import sys

import pytest
import torch
from accel_kernels import OPS, attention
from accel_kernels.device import replayed

from accel.bench import doctor
from support.kernels.cards import CARDS

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("known", [None, *CARDS], ids=lambda one: one and f"{one.name}-{one.processors}")
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_operation_as_on_another_card(op, known):
    """Multiplied as this GPU does, unless TRITON_OVERRIDE_ARCH says otherwise: sizes and choices are that card's."""
    with replayed(known or doctor.card(GPU)):
        rows = [doctor.examine_case(op, case, GPU) for case in doctor.cases_of(op)]
    wrong = [row for row in rows if any(word in row["outcome"] for word in ("differs", "failed", "was refused"))]
    assert not wrong
    assert all(row["us"] > 0 for row in rows if row["outcome"] == "agrees")


def test_a_kernel_that_does_not_fit_leaves_the_call_to_torch(monkeypatch):
    kernels = importlib.import_module("accel_kernels.attention.flash_attention_triton")
    monkeypatch.setattr(kernels, "_tile", lambda *_: kernels.Tile(128, 128, 8, 6))
    q, k, v = (torch.randn(1, 2, 300, 512, device=GPU, dtype=torch.float16) for _ in range(3))
    op = dataclasses.replace(attention)
    found = [op(q, k, v) for _ in range(2)]
    torch.testing.assert_close(found[0], attention.reference(q, k, v))
    torch.testing.assert_close(found[0], found[1])
    told = [row for row in op.outcomes.rows() if "calls checked" not in row]
    assert len(told) == 1 and "attention_kernel was refused: OutOfResources" in told[0]


SMALLER = """
import time
import torch
from accel.offload.ring import Ring
from accel_kernels.device import card

known = card(torch.device("cuda", 0))
assert (known.processors, known.compute, known.memory) == (36, (8, 9), 4 * 10**9), known
try:
    torch.empty(5 * 10**9, dtype=torch.uint8, device="cuda")
    raise SystemExit("no bound")
except torch.OutOfMemoryError:
    pass
source, buffer = torch.ones(2**28, dtype=torch.uint8).pin_memory(), torch.zeros(2**28, dtype=torch.uint8, device="cuda")
ring, seconds = Ring([buffer], [source], {0}, torch.cuda.Stream()), {}
for bus in (1.0, ring.bus) * 3:
    ring.bus = bus
    ring.end()
    torch.cuda.synchronize()
    start = time.perf_counter()
    ring.take(0)
    torch.cuda.synchronize()
    seconds[bus] = time.perf_counter() - start
assert bool(buffer.all()) and 1.8 < seconds[0.5] / seconds[1.0] < 2.2, seconds
"""


def test_a_smaller_card():
    made = os.environ | {"ACCEL_CARD": "8.9,processors=36,memory=4GB,bus=0.5"}
    done = subprocess.run([sys.executable, "-c", SMALLER], env=made, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_doctor_measures(tmp_path):
    found = doctor.diagnose(GPU)
    assert found["card"]["bandwidth"] > 1e10 and found["card"]["rate"] > 1e12
    assert {"pinned to device", "pinned to host"} <= found["bus_gb_s"].keys()
    assert not [row for row in found["kernels"] if row["outcome"].startswith(("differs", "failed"))]
