"""On this GPU: configurations of other cards, a kernel that does not fit, and what `accel doctor` finds."""

import dataclasses
import importlib

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
    (told,) = op.outcomes.rows()
    assert "attention_kernel was refused: OutOfResources" in told


def test_the_doctor_measures(tmp_path):
    found = doctor.diagnose(GPU)
    assert found["card"]["bandwidth"] > 1e10 and found["card"]["rate"] > 1e12
    assert {"pinned to device", "pinned to host"} <= found["bus_gb_s"].keys()
    assert not [row for row in found["kernels"] if row["outcome"].startswith(("differs", "failed"))]
