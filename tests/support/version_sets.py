"""The suite under the oldest, pinned and newest versions of the libraries, and docs/measurements/versions.md of them.

`make test-versions` starts it with the Python of the pinned environment. The other sets have an environment each beside
that one, brought to its versions at every start. With `libraries`, as `make test-newest` starts it, the newest
libraries are laid over the pinned environment, and only the tests that touch them run.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
PINNED = Path(sys.prefix)
PAGE = ROOT / "docs" / "measurements" / "versions.md"
# What uv is told of each set; None leaves the environment as `make` made it.
SETS = {"oldest": "lowest-direct", "pinned": None, "newest": "highest"}
SHOWN = ("python", "torch", "triton", "transformers", "diffusers", "accelerate", "peft")
OUTCOMES = ("passed", "failed", "skipped")
# What `libraries` brings up to date, with what these ask for. Torch stays, whose wheels are gigabytes.
LIBRARIES = ("transformers", "diffusers", "accelerate", "peft", "huggingface-hub", "safetensors", "tokenizers")
# Models of every kind recognized, fused, called, generated with, reported and restored: a minute of CPU time.
TOUCHING = """
    tests/compatibility tests/core/test_optimize.py tests/core/test_examples.py tests/planning/test_whole_models.py
    tests/diffusion/test_pipeline.py tests/diffusion/dit/test_blocks.py
    tests/diffusion/dit/test_adapters.py tests/diffusion/schedulers/test_patches.py tests/offload
    tests/llm/runtime tests/llm/recording tests/llm/models/test_multimodal.py tests/llm/models/test_unusual_models.py
    tests/llm/generation/test_direct_calls.py
    tests/llm/generation/test_fallbacks.py tests/llm/kv_cache/test_cache.py
    tests/llm/batching/manager/test_hook.py tests/llm/ptq/formats/test_prequantized_import.py
""".split()
VERSIONS = """
import json, platform
from importlib.metadata import distributions
print(json.dumps({found.name: found.version for found in distributions()} | {"python": platform.python_version()}))
"""
HEAD = """\
# Versions

The suite (`make test`) under three sets of versions: the oldest that `pyproject.toml` allows, those that
`constraints.txt` pins, and the newest of everything. `make test-versions` makes an environment for each, runs the
suite and writes this page; nobody edits it by hand. No GPU is needed: kernels run in Triton's interpreter.
CI runs the tests that touch the libraries under their newest versions too.

"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sets", nargs="*", choices=[*SETS, "libraries"])
    parser.add_argument("--pytest", default="", help="passed on; what runs counts anew")
    given = parser.parse_args()
    return max(
        newest_libraries(given.pytest) if name == "libraries" else run_suite(name, given.pytest)
        for name in given.sets or SETS
    )


def run_suite(name: str, arguments: str) -> int:
    """The tests in a set's environment, and the set's row of the page, of which a part runs anew only after a whole."""
    python = python_of(name)
    log, kept = python.parents[1] / "suite.xml", python.parents[1] / "outcomes.json"
    log.unlink(missing_ok=True)
    print(f"the tests under the {name} versions", flush=True)
    code = pytest(python, f"-n 2 --dist worksteal --junitxml={log} {arguments}")
    if kept.exists() or not arguments:
        found = (json.loads(kept.read_text()) if arguments else {}) | outcomes(log)
        kept.write_text(json.dumps(found))
        write_row(name, versions(python), Counter(found.values()))
    return code


def python_of(name: str) -> Path:
    """The Python of a set's environment, which is made, and brought to its versions, unless it is the pinned one."""
    if SETS[name] is None:
        return Path(sys.executable)
    folder = PINNED.with_name(f"{PINNED.name}-{name}")
    python = folder / "bin" / "python"
    print(f"bringing {folder.name} to the {name} versions", flush=True)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    uv("--quiet", "--python", python, "--resolution", SETS[name], "--upgrade", "--editable", f"{ROOT}[dev]", check=True)
    return python


def newest_libraries(arguments: str) -> int:
    """The tests that touch the libraries under the newest of these. Nothing is run where they are the pinned ones, or
    where no index answers: that is said.
    """
    upgrade = [word for library in LIBRARIES for word in ("--upgrade-package", library)]
    wanted = ("--python", sys.executable, "--requirements", ROOT / "pyproject.toml", "--extra", "dev", *upgrade)
    answer = uv("--dry-run", *wanted, capture_output=True, text=True)
    newer = [] if answer.returncode else re.findall(r"^ \+ (\S+==\S+)$", answer.stderr, re.MULTILINE)
    layer = PINNED / "newest"
    if newer:
        onto = ("--python", sys.executable, "--no-deps", "--target", layer, "--upgrade")
        answer = uv("--quiet", *onto, *newer, capture_output=True, text=True)
    if answer.returncode:
        print(answer.stderr)
        if "No solution found" in answer.stderr:
            return answer.returncode
        print("The newest versions of the libraries are NOT tested: no package index answered.")
        return 0
    if not newer:
        print("The newest versions of the libraries are those that constraints.txt pins: nothing more to test.")
        return 0
    print("the tests that touch the libraries, under", *newer, flush=True)
    return pytest(Path(sys.executable), " ".join([*TOUCHING, arguments]), PYTHONPATH=str(layer))


def uv(*arguments, **how) -> subprocess.CompletedProcess:
    command = [PINNED / "bin" / "uv", "pip", "install", "--index-strategy", "unsafe-best-match", *arguments]
    return subprocess.run(command, cwd=ROOT, **how)


def pytest(python: Path, arguments: str, **more: str) -> int:
    """As `make test` runs it."""
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""} | more
    return subprocess.run([python, "-m", "pytest", *arguments.split()], cwd=ROOT, env=variables).returncode


def versions(python: Path) -> dict[str, str]:
    return json.loads(subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout)


def outcomes(log: Path) -> dict[str, str]:
    """What each test came to: passed, failed or skipped."""
    found = {}
    for case in ElementTree.parse(log).iter("testcase"):
        kinds = {child.tag for child in case}
        name = f"{case.get('classname')}::{case.get('name')}"
        found[name] = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    return found


def write_row(name: str, found: dict[str, str], counts: Counter) -> None:
    """A set's row of the page; those of the other sets stay."""
    rows = {row.split(" | ")[0]: row for row in PAGE.read_text().splitlines()} if PAGE.exists() else {}
    cells = [found.get(package, "none") for package in SHOWN] + [counts[outcome] for outcome in OUTCOMES]
    rows[f"| {name}"] = " | ".join(map(str, [f"| {name}", *cells])) + " |"
    header = ["| | " + " | ".join([*SHOWN, *OUTCOMES]) + " |", "|---" * (len(SHOWN) + len(OUTCOMES) + 1) + "|"]
    lines = [*header, *(rows[f"| {one}"] for one in SETS if f"| {one}" in rows)]
    PAGE.write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
