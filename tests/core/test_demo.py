"""The demo, run as a user would, with few steps."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.progress import Progress
from typer.testing import CliRunner

from accel import contact_sheet, demo
from accel.cli import app

ROOT = Path(__file__).parents[2]


def test_the_command_draws_ten_digits_and_writes_the_picture(tmp_path):
    out = tmp_path / "digits.png"
    runner = CliRunner(env={"TERM": "dumb", "COLUMNS": "120"})
    arguments = ["demo", "--device", "cpu", "--steps", "2", "--out", str(out), "--model", str(ROOT / demo.MODEL)]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    with Image.open(out) as picture:
        cell = contact_sheet.CELL + contact_sheet.GAP
        assert picture.size == (contact_sheet.MARGIN + 10 * cell, contact_sheet.HEADER + 3 * cell)
        assert len(np.unique(picture.convert("L"))) > 20
    for words in ("time per image", "it/s", "peak memory", "time to ready", "max abs error", "PSNR", "bit-equal"):
        assert words in result.output
    assert "accel.optimize(pipe)" in result.output


@pytest.fixture(scope="module")
def comparison():
    with Progress(disable=True) as progress:
        return demo.run(
            ROOT / demo.MODEL,
            torch.device("cpu"),
            torch.float32,
            steps=3,
            seed=5,
            progress=progress,
            digits=("three", "seven"),
        )


def test_both_pipelines_draw_the_same(comparison):
    assert len(comparison.stock) == len(comparison.optimised) == 2
    assert comparison.max_error < 1e-3 and comparison.psnr_db > 60
    assert comparison.restored_equal


def test_different_prompts_draw_different_pictures(comparison):
    assert np.abs(comparison.stock[0] - comparison.stock[1]).max() > 0.1


def test_figures_are_of_this_run(comparison):
    assert len(comparison.stock_s) == len(comparison.optimised_s) == 2
    assert comparison.ready_s >= 0 and comparison.peak_mb is None and comparison.summary


def test_the_model_is_found_in_a_checkout_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert demo.find_model(None).resolve() == (ROOT / demo.MODEL).resolve()


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        demo.find_model(tmp_path / "nowhere")


def test_the_contact_sheet_labels_and_enlarges():
    white, black = np.ones((8, 8, 3), np.float32), np.zeros((8, 8, 3), np.float32)
    sheet = contact_sheet.contact_sheet({"a": [white, black], "b": [black, white]}, ["one", "two"])
    cell = contact_sheet.CELL + contact_sheet.GAP
    assert sheet.size == (contact_sheet.MARGIN + 2 * cell, contact_sheet.HEADER + 2 * cell)
    assert sheet.getpixel((contact_sheet.MARGIN + cell + 4, contact_sheet.HEADER + 4)) == (0, 0, 0)
    labels = np.asarray(sheet.crop((0, contact_sheet.HEADER, contact_sheet.MARGIN, sheet.height)))
    assert (labels < 128).any()
