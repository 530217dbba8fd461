"""What each mechanism gives: every one is really left out, and the model is as it was afterwards."""

import json

import pytest
import torch
from typer.testing import CliRunner

from accel.bench import ablation
from accel.bench.ablation import MECHANISMS, ablate
from support.everything import EVERYTHING


@pytest.mark.skipif(not EVERYTHING, reason="seconds of work; ACCEL_TEST_EVERYTHING=1 runs it")
def test_every_mechanism_is_left_out_in_turn_and_the_model_stays_as_it_was(tiny):
    model = tiny.unet("sdxl")
    inputs = tiny.inputs(model)
    with torch.no_grad():
        stock = model(**inputs).sample
    before, outputs, ran = tiny.snapshot(model), [], set()

    def run():
        outputs.append(model(**inputs).sample)
        ran.add(tuple(type(vars(module).get("forward")) for module in model.modules()))

    rows = list(ablate(model, run, budget_s=0.01))
    assert [row["without"] for row in rows] == [
        "stock",
        "nothing",
        *(mechanism.name for mechanism in MECHANISMS[:-1]),
    ]  # no wide single convolution
    assert all(row["ms"] > 0 for row in rows)
    assert all(row["gain_ms"] == round(row["ms"] - rows[1]["ms"], 4) for row in rows[2:])
    assert len(ran) > 4  # not the same code each time
    for output in outputs:
        torch.testing.assert_close(output, stock, rtol=1e-3, atol=1e-4)
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_a_mechanism_without_a_site_has_no_row(tiny, monkeypatch):
    monkeypatch.setattr(ablation, "MECHANISMS", MECHANISMS[2:4])
    model = tiny.vae().decoder
    latents = torch.randn(1, 4, 4, 4)
    names = {row["without"] for row in ablate(model, lambda: model(latents), budget_s=0.01)}
    assert "resnet block" in names and "transformer stack and block" not in names


def test_the_command_shows_them(tiny, tmp_path, monkeypatch):
    from accel.commands.app import app

    monkeypatch.setattr(ablation, "MECHANISMS", MECHANISMS[:2])
    monkeypatch.setattr(ablate, "__defaults__", (0.01, *ablate.__defaults__[1:]))
    tiny.unet().save_pretrained(tmp_path)
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--device", "cpu", "--measure", "--json"])
    assert done.exit_code == 0, done.output
    (rows,) = json.loads(done.stdout)["mechanisms"].values()
    assert {"without", "ms", "gain_ms", "peak_mb"} == set(rows[2])
