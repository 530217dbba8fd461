"""The layout itself: who imports whom, what importing costs, what a wheel holds, the trap in the name `kernels`."""

import ast
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import accel

ROOT = Path(__file__).parents[2]
ACCEL = ROOT / "accel"
KERNELS = ROOT / "kernels" / "accel_kernels"
TRITON = KERNELS / "triton_kernels"
# These stand above both worlds; every other file of accel's top folder is core.
ABOVE = {"cli.py", "api.py", "__main__.py"}

NAMES = {
    "Options", "Quality", "Report", "load", "optimize", "optimized", "quantize", "report", "restore", "verify",
    "__version__",
}  # fmt: skip


def files(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def package_of(path: Path) -> list[str]:
    """Dotted parts of the package a file is in."""
    base = ROOT if path.is_relative_to(ACCEL) else KERNELS.parent
    return list(path.parent.relative_to(base).parts)


def nodes(tree: ast.AST, into_functions: bool = True) -> Iterator[ast.AST]:
    """Every node below, or only those that run when the file is imported."""
    for child in ast.iter_child_nodes(tree):
        if into_functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from nodes(child, into_functions)


def imports(path: Path, into_functions: bool = True) -> set[str]:
    """Every module a file imports, under its absolute name; inside functions too unless told otherwise."""
    found = set()
    for node in nodes(ast.parse(path.read_text()), into_functions):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package_of(path)[: len(package_of(path)) - node.level + 1] if node.level else []
            module = ".".join(parts + ([node.module] if node.module else []))
            found |= {module} | {f"{module}.{name.name}" for name in node.names}
    return found


def imported(path: Path, *modules: str, into_functions: bool = True) -> set[str]:
    """Which of these modules, or of what is inside them, a file imports."""
    found = imports(path, into_functions)
    return {name for name in found for module in modules if name == module or name.startswith(module + ".")}


def test_the_folders_are_there():
    assert files(ACCEL) and files(KERNELS) and files(TRITON)


@pytest.mark.parametrize("path", files(KERNELS), ids=label)
def test_kernels_know_no_hugging_face(path):
    assert not imported(path, "accel", "transformers", "diffusers", "accelerate", "huggingface_hub")


@pytest.mark.parametrize("path", files(KERNELS), ids=label)
def test_only_the_folder_of_kernels_imports_triton_with_the_file(path):
    """Elsewhere triton may be imported when a function needs it, and the kernels by name alone."""
    if not path.is_relative_to(TRITON):
        assert not imported(path, "triton", into_functions=False)
        assert not imported(path, "accel_kernels.triton_kernels")


@pytest.mark.parametrize("path", files(ACCEL), ids=label)
def test_accel_knows_no_triton(path):
    assert not imported(path, "triton", "accel_kernels.triton_kernels")


@pytest.mark.parametrize(("world", "other"), [("diffusion", "llm"), ("llm", "diffusion")])
def test_the_two_worlds_are_apart(world, other):
    assert {label(path): imported(path, f"accel.{other}") for path in files(ACCEL / world)} == {
        label(path): set() for path in files(ACCEL / world)
    }


@pytest.mark.parametrize("path", sorted(ACCEL.glob("*.py")), ids=label)
def test_the_core_imports_only_downward(path):
    if path.name not in ABOVE:
        assert not imported(path, "accel.diffusion", "accel.llm", "accel.cli", "accel.demo", "accel.bench")


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


def test_importing_accel_is_light():
    loaded, cuda = json.loads(
        python(
            "import json, sys, torch\n"
            "before = set(sys.modules)\n"
            "import accel\n"
            "accel.optimize\n"
            "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
            "print(json.dumps([sorted(new), torch.cuda.is_initialized()]))"
        )
    )
    assert not set(loaded) & {"transformers", "diffusers", "triton", "accelerate", "typer", "PIL", "xformers"}
    assert not cuda


def test_functions_keep_their_names_beside_modules_called_the_same():
    code = (
        "import accel.report, accel.verify, accel; from accel.report import Report; from accel import report, verify\n"
    )
    code += "print(all(map(callable, (accel.report, accel.verify, report, verify))), accel.Report is Report)"
    assert python(code) == "True True"
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        accel.optimise  # noqa: B018


def test_all_that_is_public_can_be_listed_and_is_typed():
    assert set(accel.__all__) <= set(dir(accel))
    (block,) = (node for node in ast.parse((ACCEL / "__init__.py").read_text()).body if isinstance(node, ast.If))
    assert {name.name for node in block.body for name in node.names} | {"__version__"} == NAMES


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
    packed = {name for name in names if name.endswith(".py")}
    here = {path.relative_to(ROOT).as_posix() for path in files(ACCEL)}
    here |= {path.relative_to(ROOT / "kernels").as_posix() for path in files(KERNELS)}
    assert packed == here


LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, bos_token_id=1, eos_token_id=None, pad_token_id=0,
)
tokens = LlamaForCausalLM(config).generate(torch.tensor([[1, 5, 7]]), max_new_tokens=4, do_sample=False)
print(tuple(tokens.shape))
"""


def test_a_llama_generates_from_the_repository_root():
    assert python(LLAMA) == "(1, 7)"


def test_the_package_kernels_wins_over_our_folder(tmp_path):
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("mine = True\n")
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(tmp_path)])
    code = "import sys, kernels, accel_kernels; print(sys.path[0] == '', kernels.mine)"
    assert python(code, PYTHONPATH=path) == "True True"


def test_kernels_is_no_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))


EVERYWHERE = [ROOT / name for name in ("accel", "kernels", "tests", "examples", "benchmarks")]


def test_files_are_small_nouns():
    assert not [label(path) for path in files(*EVERYWHERE) if path.stem in ("utils", "helpers", "misc")]
    long = {label(path): len(path.read_text().splitlines()) for path in files(ACCEL, KERNELS)}
    assert not {name: lines for name, lines in long.items() if lines > 350}


MUTABLE_CALLS = {"dict", "list", "set", "defaultdict", "Counter", "deque", "OrderedDict", "WeakKeyDictionary"}


def mutable_state(path: Path) -> list[str]:
    """Names bound to something mutable at the top of a file; CONSTANTS and dunder names are not state."""
    found = []
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        value = node.value
        literal = isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)
        called = isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in MUTABLE_CALLS
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            name = ast.unparse(target)
            if (literal or called) and not (name.isupper() or name.startswith("__")):
                found.append(name)
    return found


@pytest.mark.parametrize("path", files(ACCEL, KERNELS), ids=label)
def test_no_mutable_module_state(path):
    tree = ast.parse(path.read_text())
    assert not mutable_state(path)
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Global)]
