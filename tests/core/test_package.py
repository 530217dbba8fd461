"""The layout itself: who imports whom, sizes and names of files, state of modules, names that mean one thing."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch import nn

ROOT = Path(__file__).parents[2]
ACCEL = ROOT / "accel"
KERNELS = ROOT / "kernels" / "accel_kernels"
TESTS = ROOT / "tests"
TRITON = "_triton"  # what the names of files end in that import triton with the file

# Every room and every file beside them, the lowest first: each imports from those before it, and from itself.
ROOMS = """
    errors libraries tolerances comparison options saved progress in_flight parallel casting
    patching offload quantization fusion cuda_graphs planning verification
    diffusion.inputs diffusion.blocks diffusion.dit diffusion.step_cache
    diffusion.linears diffusion.parallel diffusion
    llm.kv_cache llm.pipeline.device_hooks llm.recording llm.pipeline.placement
    llm.parts llm.moe llm.attention llm.runtime
    llm.generation llm.pipeline llm.generation.loop llm.batching
    llm.ptq.calibration llm.ptq.algorithms llm.ptq.formats llm.ptq llm.shards llm encoders seq2seq
    report families api
    bench demo commands replicas __main__
""".split()


def files(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def package_of(path: Path) -> list[str]:
    """Dotted parts of the package a file is in."""
    base = ROOT if path.is_relative_to(ACCEL) else KERNELS.parent
    return list(path.parent.relative_to(base).parts)


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def nodes(tree: ast.AST, into_functions: bool = True) -> Iterator[ast.AST]:
    """Every node below, or only those that run when the file is imported."""
    waiting = [tree]  # a generator in a generator a level would take six times as long
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            if into_functions or not isinstance(child, FUNCTIONS):
                yield child
                waiting.append(child)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def every_node(path: Path) -> tuple[ast.AST, ...]:
    """All that a file says, for several tests."""
    return tuple(nodes(parsed(path)))


@cache
def imports(path: Path, into_functions: bool = True) -> frozenset[str]:
    """Every module a file imports, under its absolute name; inside functions too unless told otherwise."""
    found = set()
    for node in every_node(path) if into_functions else nodes(parsed(path), into_functions):
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


HUGGING_FACE = ("transformers", "diffusers", "accelerate", "peft")
HOME = ACCEL / "libraries"
OUTSIDE = [path for path in files(ACCEL) if not path.is_relative_to(HOME) and not path.is_relative_to(ACCEL / "bench")]
RENAMED = ("past_key_values", "cache_params")  # once, by transformers
MOVE = "upstream may rename it: give it a plain name in accel/libraries, once, and import that"


def inside_of_library(name: str) -> bool:
    """Whether a dotted name is a file or folder of a library, something in one, or private."""
    library, *rest = name.split(".")
    spec = find_spec(library)
    places = [Path(place) / rest[0] for place in (spec and spec.submodule_search_locations) or () if rest]
    is_file = any(place.is_dir() or place.with_suffix(".py").is_file() for place in places)
    return len(rest) > 1 or is_file or any(part.startswith("_") for part in rest)


def written_out(node: ast.AST) -> str:
    """As ast.unparse has it, which takes many times as long for names with dots."""
    if isinstance(node, ast.Attribute):
        return f"{written_out(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ast.unparse(node)


def spelled(path: Path) -> tuple[set[str], set[str]]:
    """Attributes that a file asks others for, also with the names before them, and whole strings in it."""
    attributes, strings = set(), set()
    for node in every_node(path):
        if isinstance(node, ast.Attribute) and (written := written_out(node)) != f"self.{node.attr}":
            attributes |= {node.attr, written}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.add(node.value)
    return attributes, strings


def their_private_names() -> set[str]:
    """Those that are spelled in accel/libraries; torch has some for every module."""
    names = set().union(*(part for path in files(HOME) for part in spelled(path)))
    return {name for name in names if re.fullmatch(r"_[a-zA-Z]\w*", name)} - vars(nn.Module()).keys()


def theirs(path: Path, private: set[str]) -> set[str]:
    """What a file knows of the insides of a library of Hugging Face."""
    attributes, strings = spelled(path)
    dotted = imported(path, *HUGGING_FACE) | {name for name in attributes if name.split(".")[0] in HUGGING_FACE}
    paths = {text for text in strings if re.fullmatch(rf"({'|'.join(HUGGING_FACE)})\.[\w.]*", text)}
    renamed = {name for name in RENAMED if name in path.read_text()}
    return {*filter(inside_of_library, dotted), *paths, *(private & (attributes | strings)), *renamed}


def test_the_insides_of_libraries_are_known_in_one_room():
    private = their_private_names()
    found = told({path: theirs(path, private) for path in OUTSIDE})
    assert not found, f"{found}: {MOVE}"


def test_folders_are_small():
    every = {folder for top in (ACCEL, KERNELS, TESTS) for folder in folders(top)}
    counts = {label(folder): len(list(folder.glob("*.py"))) for folder in every}
    assert not {name: count for name, count in counts.items() if count > 16}


def folders(top: Path) -> set[Path]:
    return {path.parent for path in files(top)}


def test_kernels_is_no_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    packages = [path for path in TESTS.rglob("__init__.py") if "support" not in path.parts]
    assert not packages  # tests/ is on the path, and has a folder of that name too


EVERYWHERE = [ROOT / name for name in ("accel", "kernels", "tests", "examples", "benchmarks")]


def test_files_are_small_nouns():
    assert not [label(path) for path in files(*EVERYWHERE) if path.stem in ("utils", "helpers", "misc")]
    long = {label(path): len(path.read_text().splitlines()) for path in files(ACCEL, KERNELS, TESTS)}
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
    assert not told({path: [n.lineno for n in every_node(path) if isinstance(n, ast.Global)] for path in every})


# Names that several files may give to what they hold at their top, and why. Any other means one thing in its package.
SHARED = {
    ACCEL: {
        **dict.fromkeys(("load", "quantize", "report", "verify"), "a function, and the command of its name"),
        "quantize_layer": "the one entry of each algorithm",
        "round_activations": "the stage of that name, for images and for text",
        "run": "of each part of the demo, and of the benchmark of a module",
    },
    KERNELS: {
        **dict.fromkeys(("reference", "supports"), "of each op, which holds them"),
        **dict.fromkeys(("pays", "instead"), "whether an op gains here, and what takes its place"),
        **dict.fromkeys(("in_passes", "refusal"), "the same question of each kind of product"),
        **dict.fromkeys(("Shape", "Tile", "factor", "rounded"), "in a kernel and its reference"),
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
