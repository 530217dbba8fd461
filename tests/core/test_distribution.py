"""What is built and installed, and beside which versions."""

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import accel
from accel.commands.app import app
from accel.libraries import versions
from accel.libraries.cache import SOUGHT
from accel.llm.recording.record import NotUnderstood
from support import version_sets
from support.llm import families

ROOT = Path(__file__).parents[2]
ACCEL = ROOT / "accel"
KERNELS = ROOT / "kernels" / "accel_kernels"

NAMES = {
    "Options", "Quality", "Report", "load", "optimize", "optimized", "quantize", "register_op", "report", "restore",
    "verify", "__version__", "errors",
}  # fmt: skip


def files(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def test_public_names_are_frozen():
    assert set(accel.__all__) == NAMES
    assert all(hasattr(accel, name) for name in NAMES)


def python(code: str, **environment: str) -> str:
    """Runs code as `python -c` from the repository root, which puts that folder first on sys.path."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


IMPORTING = """
import json, sys, torch
before = set(sys.modules)
import accel
accel.optimize
kinds = [getattr(accel.errors, name) for name in accel.errors.__all__]
documented = all(issubclass(kind, Exception) and kind.__doc__ for kind in kinds)
new = {name.split('.')[0] for name in set(sys.modules) - before}
import accel.report, accel, accel_kernels, kernels; from accel.report import Report; from accel import report, verify
found = {
    "new": sorted(new), "cuda": torch.cuda.is_initialized(), "documented": documented, "errors": accel.errors.__all__,
    "functions": all(map(callable, (accel.report, accel.verify, report, verify))), "same": accel.Report is Report,
    "first": sys.path[0], "theirs": kernels.mine,
}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """What is found by a fresh process in the repository root, where packages that are installed have one `kernels`."""
    package = tmp_path_factory.mktemp("installed") / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("mine = True\n")
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(package.parent)])
    return json.loads(python(IMPORTING, PYTHONPATH=path))


@pytest.mark.turns(2)
def test_importing_accel_is_light_and_brings_its_errors(imported):
    assert not set(imported["new"]) & {"transformers", "diffusers", "triton", "accelerate", "typer", "PIL", "xformers"}
    assert not imported["cuda"]
    assert imported["documented"] and imported["errors"] == [
        "InUse",
        "PatchConflict",
        "RanksApart",
        "Refused",
        "SkippedSite",
    ]
    assert issubclass(accel.errors.SkippedSite, ValueError) and issubclass(accel.errors.PatchConflict, RuntimeError)
    # Functions keep their names beside modules of that name; an installed package `kernels` wins over our folder.
    assert imported["functions"] and imported["same"] and imported["first"] == "" and imported["theirs"]
    with pytest.raises(AttributeError, match="no attribute 'optimizes'"):
        accel.optimizes  # noqa: B018


def test_all_that_is_public_can_be_listed_and_is_typed():
    assert set(accel.__all__) <= set(dir(accel))
    (block,) = (node for node in ast.parse((ACCEL / "__init__.py").read_text()).body if isinstance(node, ast.If))
    assert {name.name for node in block.body for name in node.names} | {"__version__"} == NAMES


@pytest.mark.turns(2)
def test_a_wheel_holds_two_packages(tmp_path):
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith("hf_accel-")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"accel", "accel_kernels"}
    assert len(top) == 3
    assert {"accel/py.typed", "accel_kernels/py.typed"} <= set(names)  # annotations count for who installs it
    packed = {name for name in names if name.endswith(".py")}
    here = {path.relative_to(ROOT).as_posix() for path in files(ACCEL)}
    here |= {path.relative_to(ROOT / "kernels").as_posix() for path in files(KERNELS)}
    assert packed == here


def test_a_llama_generates_from_the_repository_root():
    """The root comes first on this process's path, before anything is imported: see pythonpath in pyproject.toml."""
    places = [Path(place).resolve() for place in sys.path]
    assert places.index(ROOT) < min(number for number, place in enumerate(places) if place.name == "site-packages")
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    tokens = LlamaForCausalLM(config).generate(torch.tensor([[1, 5, 7]]), max_new_tokens=4, do_sample=False)
    assert tokens.shape == (1, 7)


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
        (("accel.llm.runtime.analyze.cache_argument", lambda _: None), f"its forward takes no cache: {SOUGHT}"),
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
