"""The demo, run as a user would, with few steps."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner

from accel.commands.app import app
from accel.demo import contact_sheet, continuation, digits
from accel.demo.comparison import find_folder, speed_ratio
from accel.planning.whole_models import ON_CPU
from accel.report import Report
from support.everything import EVERYTHING

ROOT = Path(__file__).parents[2]
STOCK = ("", ON_CPU, "skipped", "runs stock there")


@pytest.mark.turns(4)
def test_the_command_draws_ten_digits_twice_and_continues_a_prompt(tmp_path):
    out = tmp_path / "digits.png"
    runner = CliRunner(env={"TERM": "dumb", "COLUMNS": "120"})
    arguments = ["demo", "--device", "cpu", "--steps", "1", "--out", str(out), "--model", str(ROOT / digits.MODEL)]
    arguments += ["--transformer", str(ROOT / digits.TRANSFORMER)]
    arguments += ["--tokens", "8", "--prompt", "Mr. Darcy", "--language-model", str(ROOT / continuation.MODEL)]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    with Image.open(out) as picture:
        cell = contact_sheet.CELL + contact_sheet.GAP
        height = contact_sheet.HEADER + 3 * cell
        assert picture.size == (contact_sheet.MARGIN + 10 * cell, 2 * height)
        for top in (0, height):
            assert len(np.unique(picture.crop((0, top, picture.width, top + height)).convert("L"))) > 20
    assert "UNet: 10 digits of 1 steps" in result.output and "transformer: 10 digits of 1 steps" in result.output
    for words in ("time per image", "it/s", "peak memory", "time to ready", "max abs error", "PSNR", "bit-equal"):
        assert result.output.count(words) >= 2
    for words in ("8 tokens after a prompt", "tokens per second", "same tokens", "both: Mr. Darcy", "On a CPU"):
        assert words in result.output
    assert "accel.optimize(pipe)" in result.output


@pytest.fixture(
    scope="module", params=[digits.TRANSFORMER, digits.MODEL][: 1 + EVERYTHING], ids=lambda folder: folder.name
)
def comparison(request):
    with Progress(disable=True) as progress:
        return digits.run(
            ROOT / request.param,
            torch.device("cpu"),
            torch.float32,
            steps=3,
            seed=5,
            progress=progress,
            digits=("three", "seven"),
        )


def test_both_pipelines_draw_the_same(comparison):
    assert len(comparison.stock) == len(comparison.optimized) == 2
    assert comparison.max_error < 1e-3 and comparison.psnr_db > 60
    assert comparison.restored_equal
    assert np.abs(comparison.stock[0] - comparison.stock[1]).max() > 0.1
    assert len(comparison.stock_s) == len(comparison.optimized_s) == 2
    assert comparison.ready_s >= 0 and comparison.peak_mb is None and comparison.report.summary()


PARTS = {digits.MODEL: "pipeline", digits.TRANSFORMER: "pipeline", continuation.MODEL: "model"}


@pytest.mark.parametrize(("shipped", "kind"), PARTS.items(), ids=lambda one: str(one))
def test_the_model_is_found_in_a_checkout_from_anywhere_and_named_where_it_is_missing(
    shipped, kind, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert find_folder(None, shipped, kind).resolve() == (ROOT / shipped).resolve()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        find_folder(tmp_path / "nowhere", shipped, kind)


@pytest.fixture(scope="module")
def written():
    with Progress(disable=True) as progress:
        call = {"prompt": "Emma could not", "new_tokens": 12, "seed": 3, "progress": progress}
        return continuation.run(ROOT / continuation.MODEL, torch.device("cpu"), torch.float32, **call)


def test_both_models_write_the_same(written):
    assert len(written.stock) == written.same == 12 and written.stock == written.optimized
    assert written.texts[0] == written.texts[1] and written.texts[0].strip()
    assert written.restored_equal
    assert len(written.stock_s) == len(written.optimized_s) == continuation.RUNS
    assert written.ready_s >= 0 and written.report.summary()


@pytest.mark.share(1)
@pytest.mark.parametrize(
    ("sites", "ours", "shown"),
    [((), (2.0, 2.2), "0.50x"), ((STOCK,), (2.0, 2.2), "0.50x"), ((STOCK,), (0.9, 2.2), "as stock")],
)
def test_noise_is_no_ratio(sites, ours, shown):
    assert speed_ratio([1.0, 1.1], ours, Report(list(sites), [], [])) == shown


def test_texts_that_part_are_both_shown(written):
    parted = replace(written, optimized=[*written.stock[:7], -1, *written.stock[8:]], texts=(" a b", " a c"))
    console = Console(record=True, width=120)
    parted.show(console)
    shown = console.export_text()
    assert "the first 7" in shown and "stock: Emma could not a b" in shown and "accel: Emma could not a c" in shown
    assert "rounding" in shown


def test_contact_sheets_label_enlarge_and_are_stacked_on_white():
    white, black = np.ones((8, 8, 3), np.float32), np.zeros((8, 8, 3), np.float32)
    sheet = contact_sheet.contact_sheet({"a": [white, black], "b": [black, white]}, ["one", "two"], "digits")
    cell = contact_sheet.CELL + contact_sheet.GAP
    assert sheet.size == (contact_sheet.MARGIN + 2 * cell, contact_sheet.HEADER + 2 * cell)
    assert sheet.getpixel((contact_sheet.MARGIN + cell + 4, contact_sheet.HEADER + 4)) == (0, 0, 0)
    for top, bottom in ((0, contact_sheet.HEADER), (contact_sheet.HEADER, sheet.height)):  # the title, the labels
        assert (np.asarray(sheet.crop((0, top, contact_sheet.MARGIN, bottom))) < 128).any()
    whole = contact_sheet.stack_sheets([Image.new("RGB", (10, 4), "black"), Image.new("RGB", (20, 6), "red")])
    assert whole.size == (20, 10)
    assert [whole.getpixel(at) for at in ((5, 3), (15, 3), (19, 9))] == [(0, 0, 0), (255, 255, 255), (255, 0, 0)]
