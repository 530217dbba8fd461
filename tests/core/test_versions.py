"""A library that is newer than the newest that was tested: it is said once, and the report keeps it."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import accel
from accel.commands.app import app
from accel.libraries import versions
from accel.libraries.cache import SOUGHT
from accel.llm.recording.errors import NotUnderstood
from support import version_sets
from support.llm import families

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("now", "newer"), [("5.24.1", False), ("5.17.0", False), ("5.25.0.dev0", True), ("6.0", True), (None, False)]
)
def test_what_is_newer_is_told(now, newer, monkeypatch):
    monkeypatch.setattr(versions, "TESTED", {"transformers": ("5.17", "5.24")})
    monkeypatch.setattr(versions, "installed", lambda package: now)
    assert versions.newer_than_tested() == (
        [f"transformers {now} is newer than 5.24, the newest that accel was tested with"] if newer else []
    )


def test_optimize_and_the_report_say_so(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda package: "99.1" if package == "diffusers" else None)
    model = families.make("llama")
    with pytest.warns(UserWarning, match=r"diffusers 99\.1 is newer than"):
        accel.optimize(model)
    assert "diffusers 99.1 is newer than" in str(accel.report(model))


def refusing(*_, **__):
    raise NotUnderstood("no list of 2 layers")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (("accel.llm.analysis.analyze.cache_argument", lambda _: None), f"its forward takes no cache: {SOUGHT}"),
        (("accel.llm.recording.recorder.decoder_layers", refusing), "no list of 2 layers"),
        (("accel.llm.family.find_convention", refusing), "no list of 2 layers"),
    ],
    ids=["no cache", "not recorded", "not tried"],
)
def test_why_a_whole_model_runs_stock_says_so_too(changed, reason, monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda package: "99.1" if package == "transformers" else None)
    monkeypatch.setattr(*changed)
    model = families.make("llama")
    with pytest.warns(UserWarning, match=r"transformers 99\.1"):
        accel.optimize(model, accel.Options(cpu="fuse"))
    (told,) = {reason for _, rule, _, reason in accel.report(model).sites if rule == "language model"}
    assert told == f"{reason}; {versions.newer_than_tested()[0]}"


def test_the_command_shows_versions():
    shown = CliRunner().invoke(app, ["--version"])
    assert shown.exit_code == 0 and f"accel {accel.__version__}" in shown.output
    assert all(f"{package} " in shown.output for package in versions.TESTED)


def test_what_was_tested_is_what_ran():
    """The page that `make test-versions` writes, the versions that optimize asks for, and what may be installed."""
    page = (ROOT / "docs/measurements/versions.md").read_text(encoding="utf-8")
    header, _, *rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    ran = {row[0]: dict(zip(header, row[1:], strict=True)) for row in rows}
    tested = re.findall(r'"(\w+)": \("([\d.]+)", "([\d.]+)"\)', Path(versions.__file__).read_text())
    assert {package for package, _, _ in tested} == set(versions.TESTED)
    for package, oldest, newest in tested:
        assert versions._numbers(oldest) == versions._numbers(ran["oldest"][package]), package
        assert versions._numbers(newest) == versions._numbers(ran["newest"][package]), package
    bounds = dict(re.findall(r'^    "(\w+)>=([\d.]+)["; ]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    for package in ("torch", "triton", "transformers", "diffusers", "accelerate", "peft"):
        assert versions._numbers(bounds[package]) == versions._numbers(ran["oldest"][package]), package
    assert all((ROOT / path).exists() for path in version_sets.TOUCHING)
