"""The layout itself: who imports whom, what importing costs, what a wheel holds, the trap in the name `kernels`."""

import ast
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import accel

ROOT = Path(__file__).parents[2]
ACCEL = ROOT / "accel"
KERNELS = ROOT / "kernels" / "accel_kernels"
TRITON = "_triton"  # what the names of files end in that import triton with the file

# Every room and every file beside them, the lowest first: each imports from those before it, and from itself.
ROOMS = """
    errors tolerances options saved progress
    patching quantization fusion cuda_graphs planning verification
    diffusion.inputs diffusion.blocks diffusion.step_cache diffusion
    llm.kv_cache llm.recording llm.runtime.linear llm.analysis llm.runtime llm.generation
    llm.ptq.calibration llm.ptq.algorithms llm.ptq.formats llm.ptq llm
    report api
    bench demo commands __main__
""".split()

NAMES = {
    "Options", "Quality", "Report", "load", "optimize", "optimized", "quantize", "register_op", "report", "restore",
    "verify", "__version__", "errors",
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


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path, into_functions: bool = True) -> frozenset[str]:
    """Every module a file imports, under its absolute name; inside functions too unless told otherwise."""
    found = set()
    for node in nodes(parsed(path), into_functions):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package_of(path)[: len(package_of(path)) - node.level + 1] if node.level else []
            module = ".".join(parts + ([node.module] if node.module else []))
            found |= {module} | {f"{module}.{name.name}" for name in node.names}
    return frozenset(found)


def imported(path: Path, *modules: str, into_functions: bool = True) -> set[str]:
    """Which of these modules, or of what is inside them, a file imports."""
    found = imports(path, into_functions)
    return {name for name in found for module in modules if name == module or name.startswith(module + ".")}


def test_the_folders_are_there():
    assert files(ACCEL) and any(path.stem.endswith(TRITON) for path in files(KERNELS))


def told(found: dict[Path, object]) -> dict[str, object]:
    """Those of the files of which something was found."""
    return {label(path): names for path, names in found.items() if names}


def kernel_files(path: Path) -> list[str]:
    """The files that import triton, of those a file imports."""
    return [name for name in imports(path) if name.split(".")[0] == "accel_kernels" and TRITON in name]


def test_kernels_know_no_hugging_face():
    foreign = ("accel", "transformers", "diffusers", "accelerate", "huggingface_hub")
    assert not told({path: imported(path, *foreign) for path in files(KERNELS)})


def test_only_kernels_import_triton_with_the_file():
    """Elsewhere triton may be imported when a function needs it, and the kernels by name alone."""
    others = [path for path in files(KERNELS) if not path.stem.endswith(TRITON)]
    assert not told({path: imported(path, "triton", into_functions=False) for path in others})
    assert not told({path: kernel_files(path) for path in others})


def test_accel_knows_no_triton():
    assert not told({path: imported(path, "triton") for path in files(ACCEL)})
    assert not told({path: kernel_files(path) for path in files(ACCEL)})


@pytest.mark.parametrize(("world", "other"), [("diffusion", "llm"), ("llm", "diffusion")])
def test_the_two_worlds_are_apart(world, other):
    assert {label(path): imported(path, f"accel.{other}") for path in files(ACCEL / world)} == {
        label(path): set() for path in files(ACCEL / world)
    }


def dotted(path: Path) -> str:
    """A file as a module."""
    base = ROOT if path.is_relative_to(ACCEL) else KERNELS.parent
    return ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str | None:
    """The room of a module of accel: the longest of the names in ROOMS that it begins with."""
    inside = module.removeprefix("accel.")
    fitting = [room for room in ROOMS if inside == room or inside.startswith(room + ".")]
    return max(fitting, key=len, default=None)


def modules(*folders: Path) -> dict[str, set[str]]:
    """Of every module those that it imports."""
    paths = {dotted(path): path for path in files(*folders)}
    return {name: imports(path) & paths.keys() - {name} for name, path in paths.items()}


def test_rooms_import_only_downward():
    wrong = []
    for name, others in modules(ACCEL).items():
        assert name == "accel" or room_of(name), f"{name} is in no room"
        if name != "accel":
            at = ROOMS.index(room_of(name))
            wrong += [(name, other) for other in others - {"accel"} if ROOMS.index(room_of(other)) > at]
    assert not wrong


def test_no_import_goes_in_a_circle():
    left = modules(ACCEL, KERNELS)
    left = {name: others - {"accel", "accel_kernels"} for name, others in left.items()}
    while free := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in free}
    assert not left


def test_folders_are_small():
    counts = {label(folder): len(list(folder.glob("*.py"))) for top in (ACCEL, KERNELS) for folder in folders(top)}
    assert not {name: count for name, count in counts.items() if count > 16}


def folders(top: Path) -> set[Path]:
    return {path.parent for path in files(top)}


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
    code = "import accel.report, accel; from accel.report import Report; from accel import report, verify\n"
    code += "print(all(map(callable, (accel.report, accel.verify, report, verify))), accel.Report is Report)"
    assert python(code) == "True True"
    with pytest.raises(AttributeError, match="no attribute 'optimizes'"):
        accel.optimizes  # noqa: B018


def test_errors_can_be_caught_by_who_imports_accel_alone():
    code = "import accel; names = accel.errors.__all__\n"
    code += "kinds = [getattr(accel.errors, name) for name in names]\n"
    code += "print(all(issubclass(kind, Exception) and kind.__doc__ for kind in kinds), *names)"
    assert python(code) == "True PatchConflict Refused SkippedSite"
    assert issubclass(accel.errors.SkippedSite, ValueError) and issubclass(accel.errors.PatchConflict, RuntimeError)


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
    assert {"accel/py.typed", "accel_kernels/py.typed"} <= set(names)  # annotations count for who installs it
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
    packages = [path for path in (ROOT / "tests").rglob("__init__.py") if "support" not in path.parts]
    assert not packages  # tests/ is on the path, and has a folder of that name too


EVERYWHERE = [ROOT / name for name in ("accel", "kernels", "tests", "examples", "benchmarks")]


def test_files_are_small_nouns():
    assert not [label(path) for path in files(*EVERYWHERE) if path.stem in ("utils", "helpers", "misc")]
    long = {label(path): len(path.read_text().splitlines()) for path in files(ACCEL, KERNELS)}
    assert not {name: lines for name, lines in long.items() if lines > 350}


MUTABLE_CALLS = {"dict", "list", "set", "defaultdict", "Counter", "deque", "OrderedDict", "WeakKeyDictionary"}


def mutable_state(path: Path) -> list[str]:
    """Names bound to something mutable at the top of a file; CONSTANTS and dunder names are not state."""
    found = []
    for node in parsed(path).body:
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


def test_no_mutable_module_state():
    every = files(ACCEL, KERNELS)
    assert not told({path: mutable_state(path) for path in every})
    assert not told({path: [n.lineno for n in ast.walk(parsed(path)) if isinstance(n, ast.Global)] for path in every})


# Names that several files may give to what they hold at their top, and why. Any other means one thing in its package.
SHARED = {
    ACCEL: {
        **dict.fromkeys(("load", "profile", "quantize", "report", "verify"), "a function, and the command of its name"),
        "quantize_layer": "the one entry of each algorithm",
        "round_activations": "the stage of that name, for images and for text",
        **dict.fromkeys(("find_model", "run"), "of each part of the demo; run also of the benchmark of a module"),
    },
    KERNELS: {
        **dict.fromkeys(("reference", "supports", "compile_case"), "of each op, which holds them"),
        **dict.fromkeys(("pays", "instead"), "whether an op gains here, and what takes its place"),
        **dict.fromkeys(("in_passes", "interpreted", "refusal"), "the same question of each kind of product"),
        **dict.fromkeys(("Shape", "Tile", "apply_norm", "factor", "rounded"), "in a kernel and its reference"),
    },
}


def public_names(path: Path) -> set[str]:
    """Functions and classes at the top of a file, without a leading underscore."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = {node.name for node in parsed(path).body if isinstance(node, kinds)}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("top", SHARED, ids=label)
def test_a_public_name_means_one_thing(top):
    where = {}
    for path in files(top):
        for name in public_names(path):
            where.setdefault(name, []).append(label(path))
    several = {name: found for name, found in where.items() if len(found) > 1}
    assert not {name: found for name, found in several.items() if name not in SHARED[top]}
