"""Kernels compiled for GPUs that are not here, with any compiler."""

import os
import sys
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("triton")

from accel_kernels.compiling.compilers_triton import Compilers, compilers_of
from accel_kernels.compiling.kernel_hash import hash_callees_first

from support.everything import EVERYTHING
from support.kernels.compiler import in_a_process

EACH = """
import sys
from accel_kernels import OPS
from support.kernels.cards import made_up
from support.kernels.compile_matrix import configurations, examined, read, sampled

card, third, everything = made_up(90), int(sys.argv[1]), sys.argv[2:] == ["all"]
elsewhere = {"skinny_wgmma_kernel", "gemv_mma_kernel", "expert_rows_kernel"}  # tests of their own compile them
ways = configurations([card], OPS[third::3], dtypes=1, share=1 if everything else 4)
if not everything:  # with what is launched for many tokens alone
    ways |= configurations([card], [op for op in OPS[third::3] if op.name == "experts"], dtypes=1, share=2)
first = {launch.name: launch for launch in reversed(ways.values())}
assert third or elsewhere <= first.keys()
chosen = sampled({launch.way: launch for launch in first.values()}, len(first) if everything else 2)
rows = examined((launch for launch in chosen if launch.name not in elsewhere), card, whole=False)
for launch in first.values():
    if launch not in chosen:
        read(launch)
print(len(rows), *first)
"""
MATRIX = """
import sys
from accel_kernels import OPS
from support.kernels.cards import CARDS
from support.kernels.compile_matrix import configurations, examined, sampled

arch, everything = int(sys.argv[1]), sys.argv[2:] == ["all"]
cards = [card for card in CARDS if card.compute == divmod(arch, 10)]
ops = OPS if everything else OPS[arch % 12 :: 12]
ways = configurations(cards, ops, **{} if everything else {"dtypes": 1, "share": 2})
examined(ways.values() if everything else (), cards[0], whole=False)
rows = examined(sampled(ways, 60 if everything else 1), cards[0], whole=True)
print(len(ways), len(rows))
"""


@pytest.mark.parametrize(("third", "least"), [(0, 36), (1, 21), (2, 21)])
@pytest.mark.turns(3)
def test_kernels_compile(third: int, least: int, tmp_path: Path):
    """Every kernel is read; a share of them, or all, is made code of."""
    compiled, *kernels = in_a_process(EACH, tmp_path, str(third), *["all"] * EVERYTHING).split()
    assert len(kernels) >= least and int(compiled) >= 1


@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 100, 120])
@pytest.mark.share(1)
@pytest.mark.turns(4)
def test_what_is_chosen_fits_each_card(arch: int, tmp_path: Path):
    """For every case there is a configuration, which takes no more shared memory than there is, and spills little."""
    ways, assembled = map(int, in_a_process(MATRIX, tmp_path, str(arch), *["all"] * EVERYTHING).split())
    assert ways >= assembled >= 1


READ = """
import torch
import triton
from accel_kernels import OPS
from support.kernels.absent_gpu import GPU, absent_gpu
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
sources = (ASTSource, GluonASTSource)


class Read(Exception):
    pass


def reading(make_ir):
    def read(*args, **kwargs):
        make_ir(*args, **kwargs)
        raise Read

    return read


with absent_gpu(90) as found:
    for op in OPS:
        for number, case in enumerate(op.cases):
            args, more = case.make(GPU, DTYPES[number % len(DTYPES)])
            if op.supports(*args, **more) is None:
                op.triton(*args, **more)
ways = list({launch.way: launch for launch in found}.values())
for source in sources:
    source.make_ir = reading(source.make_ir)
for launch in ways:
    try:
        launch.compiled()
    except Read:  # or a launcher that asks how many registers it takes has compiled it before
        pass
print(triton.__version__, len(ways), len({launch.name for launch in ways}))
"""


@pytest.mark.skipif(not EVERYTHING, reason="make test-all installs that Triton, and runs it")
def test_the_oldest_triton_reads_the_kernels(tmp_path: Path):
    """Its language has less than that of the one installed. What it reads it compiles: its passes are not ours."""
    oldest = Path(sys.prefix, "oldest-triton")
    if not oldest.is_dir():
        pytest.skip("no Triton of another version beside the environment's own, see the Makefile")
    version, ways, kernels = in_a_process(READ, tmp_path, first=oldest).split()
    assert version == "3.6.0" and int(ways) >= 200 and int(kernels) >= 30


COMPILED = """
import pathlib
import sys
import torch
import triton
from concurrent.futures import ThreadPoolExecutor
from accel_kernels import rowwise, upsample
from accel_kernels.compiling.compilers_triton import CompileBeside, Compilers
from accel_kernels.warmup import _ready
from support.kernels.absent_gpu import GPU, absent_gpu
from triton import knobs

hits = {}
knobs.compilation.listener = lambda src, cache_hit, **more: hits.setdefault(src.name, []).append(cache_hit)
with absent_gpu(90) as found:
    for op in (rowwise, upsample):
        args, more = op.cases[0].make(GPU, torch.bfloat16)
        assert op.supports(*args, **more) is None
        op.triton(*args, **more)
kernels = list({launch.name: launch for launch in found}.values())
scope = {"triton": triton, "tl": triton.language}
text = pathlib.Path(sys.argv[1]).read_text()
exec(compile(text, sys.argv[1], "exec"), scope)  # in no module that could be imported there
unknown = found[0]._replace(kernel=scope["lonely"], args=(triton.MockTensor(torch.float32),), meta={})


def compiled(kernels, compilers):
    with ThreadPoolExecutor(3) as threads, CompileBeside(threads, compilers):
        made = [launch.compiled() for launch in kernels]
    assert all(len(_ready(one).asm["cubin"]) > 100 for one in made)
    return compilers.compiled


compilers = Compilers(2)
assert compiled([*kernels, unknown], compilers) == len(kernels)
assert hits.pop("lonely") == [False]
assert hits and all(all(each) for each in hits.values()), hits  # what they compiled is what is looked for here
assert [compilers.compile(b"no pickle") for _ in range(2)] == [False, False]
assert compilers._process.poll() is None  # what does not compile ends nothing else
compilers.close()
for launch in kernels:
    launch.kernel.device_caches.clear()
others = Compilers(2)
assert compiled(kernels, others) == 0 and others._process is None  # all are there: nothing is started
print(sorted(launch.name for launch in kernels))
"""
HASHED = """
import importlib, inspect, pkgutil, random
import accel_kernels
from accel_kernels.compiling.kernel_hash import hash_callees_first
from triton.runtime.jit import JITFunction

names = [one.name for one in pkgutil.walk_packages(accel_kernels.__path__, "accel_kernels.")]
modules = [importlib.import_module(name) for name in names if name.endswith("_triton")]
kernels = {id(one): one for module in modules for one in vars(module).values() if isinstance(one, JITFunction)}
kernels = list(kernels.values())


def hashes(order):
    everything = list(kernels)
    for one in everything:
        one.hash, one.used_global_vals = None, {}
    for one in order:
        hash_callees_first(one)
    return {one.__name__ + one.fn.__module__: one.cache_key for one in kernels}


wanted = hashes(kernels)
assert len(wanted) > 50
for seed in range(3):
    order = random.Random(seed).sample(kernels, len(kernels))
    found = hashes(order)
    assert found == wanted, [name for name in found if found[name] != wanted[name]]
print("alike")
"""
LONELY = "@triton.jit\ndef lonely(x_ptr):\n    tl.store(x_ptr, 0.0)\n"


def test_what_they_compile_is_found(tmp_path: Path):
    file = tmp_path / "lonely.py"
    file.write_text(LONELY)
    assert in_a_process(COMPILED, tmp_path, str(file)).strip() == str(["rowwise_kernel", "upsample_kernel"])


class Hashed:
    """As Triton keeps a compiled function, up to 3.8: its hash has the constants of what has been hashed before it."""

    order: ClassVar[list] = []

    def __init__(self, fn):
        self.fn, self.hash = fn, None

    @property
    def cache_key(self):
        self.hash = self.hash or self.fn.__name__
        self.order.append(self.hash)
        return self.hash


@Hashed
def inner():
    return None


@Hashed
def middle():
    return inner, middle  # calls itself, too


def test_what_a_kernel_calls_is_hashed_before_it(monkeypatch):
    monkeypatch.setattr(Hashed, "order", [])
    last = Hashed(inner.fn)

    def outer():
        return middle, inner, last

    kernel = Hashed(outer)
    for _ in range(2):
        hash_callees_first(kernel)
    assert Hashed.order[:2] == ["inner", "middle"] and Hashed.order[2:] == ["inner", "outer"]
    hash_callees_first(print)  # an interpreted kernel has no hash


@pytest.mark.skipif(not EVERYTHING, reason="make test-all installs that Triton, and runs it")
def test_hashes_do_not_hang_on_the_order_of_launches(tmp_path: Path):
    """Up to Triton 3.8 they do, of kernels that call what has constants."""
    oldest = Path(sys.prefix, "oldest-triton")
    if not oldest.is_dir():
        pytest.skip("no Triton of another version beside the environment's own, see the Makefile")
    assert in_a_process(HASHED, tmp_path, first=oldest).strip() == "alike"


@pytest.mark.parametrize(
    "program",
    [
        "import time; time.sleep(600)",
        "import os; os.kill(os.getpid(), 9)",
        "print('nonsense', flush=True); import time; time.sleep(600)",
        "import sys; sys.stdin.buffer.read(100); sys.exit(3)",
        "pass",
    ],
    ids=["hangs", "dies", "talks nonsense", "fails", "ends"],
)
def test_a_process_that_fails_is_done_without(program: str):
    compilers = Compilers(2, [sys.executable, "-I", "-S", "-c", program], patience=0.5)
    for _ in range(2):
        assert not compilers.compile(b"a job")
    compilers.close()
    assert compilers.compiled == 0


def test_none_is_started_where_that_cannot_be():
    assert not Compilers(2, ["/no/such/program"]).compile(b"a job")
    assert not Compilers(1).compile(b"a job")


def test_a_forked_process_has_its_own():
    assert compilers_of(os.getpid()) is compilers_of(os.getpid())
    assert compilers_of(os.getpid()) is not compilers_of(os.getppid())


STAGES = """
import torch
from accel_kernels import experts
from support.kernels.absent_gpu import GPU, absent_gpu

case = next(one for one in experts.cases if one.name == "qwen3-moe-2048-int4")
for generation in (86, 80):
    with absent_gpu(generation) as found:
        args, more = case.make(GPU, torch.bfloat16)
        experts.triton(*args, **more)
    print(*(launch.meta["num_stages"] for launch in found if "grouped" in launch.name))
"""


def test_experts_in_4_bits_take_the_stages_that_fit(tmp_path: Path):
    """Words of eight numbers make steps of more bytes than a tile's; 8.6 has less shared memory."""
    assert in_a_process(STAGES, tmp_path).split() == ["1", "2", "3", "3"]


IMPORTED = """
import sys
from pathlib import Path
from accel_kernels.compiling import compiler_process as process
folder = Path(process.__file__).parents[1]
for name in [name for name in sys.modules if name.partition(".")[0] in ("torch", "accel_kernels")]:
    del sys.modules[name]
process.import_without_torch(str(folder))
for path in folder.rglob("*_triton.py"):
    print(__import__(".".join(("accel_kernels", *path.relative_to(folder).with_suffix("").parts))).__name__)
"""


@pytest.mark.turns(2)
def test_files_of_kernels_are_imported_without_torch(tmp_path):
    """Else kernels are not compiled side by side, but one by one where they are launched."""
    assert len(in_a_process(IMPORTED, tmp_path).split()) > 50
