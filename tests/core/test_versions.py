"""A library that is newer than the newest that was tested: it is said once, and the report keeps it."""

import pytest
from typer.testing import CliRunner

import accel
from accel.commands.app import app
from accel.libraries import versions
from support.llm import families


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
    monkeypatch.setattr(versions, "installed", lambda package: "99.0" if package == "diffusers" else None)
    model = families.make("llama")
    with pytest.warns(UserWarning, match=r"diffusers 99\.0 is newer than"):
        accel.optimize(model)
    assert "diffusers 99.0 is newer than" in str(accel.report(model))


def test_the_command_shows_versions():
    shown = CliRunner().invoke(app, ["--version"])
    assert shown.exit_code == 0 and f"accel {accel.__version__}" in shown.output
    assert all(f"{package} " in shown.output for package in versions.TESTED)
