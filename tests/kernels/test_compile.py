"""Every kernel compiles for the GPUs we name, on a machine without one.

What the launchers launch for the cases of all operations, see `absent_gpu`. For compute capability 9.0 each kernel
once, of its first large case. Of those that hold what is compiled by generation, products of matrices and
instructions written out, every eighth once more for one of the others, in turn. ACCEL_TEST_EVERYTHING=1 compiles for
all of them, each kernel in every way that its large cases ask for, and has the oldest Triton read them.

To PTX they all go. The assembler, ptxas, reads those with instructions written out, the only PTX that is ours; with
ACCEL_TEST_EVERYTHING=1 all of it.
"""

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from support.everything import EVERYTHING
from support.kernels.compiler import in_a_process

CHECK = """
import os
import sys
import torch
from accel_kernels import OPS
from support.kernels.absent_gpu import GPU, SHARED, absent_gpu
from triton.backends.nvidia.compiler import CUDABackend

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
make_llir, make_cubin = CUDABackend.make_llir, CUDABackend.make_cubin
assembled = 0
everything = sys.argv[1:] == ["all"]
elsewhere = set() if everything else {"skinny_wgmma_kernel", "gemv_mma_kernel"}  # tests of their own do it
by_generation = set(elsewhere)


def lower(self, src, *args):
    self.written_out = "inline_asm" in str(src)
    os.environ["DISABLE_LLVM_OPT"] = str(int(not (everything or self.written_out)))
    return make_llir(self, src, *args)


def assemble(self, src, *args):
    global assembled
    if not (everything or self.written_out):
        return b"not assembled"
    assembled += 1
    return make_cubin(self, src, *args)


CUDABackend.make_llir, CUDABackend.make_cubin = lower, assemble


launched_by = {}  # by the name of a kernel, an operation


def launches(arch, small, ops=OPS):
    with absent_gpu(arch) as found:
        for op in ops:
            before = len(found)
            for number, case in enumerate(sorted(op.cases, key=lambda case: case.small)):
                for turn in range(len(DTYPES) if small or not case.small else 0):
                    args, more = case.make(GPU, DTYPES[(number + turn) % len(DTYPES)])
                    if op.supports(*args, **more) is None:
                        op.triton(*args, **more)
                        if op.instead is not None:
                            op.instead(*args, **more)
                        break
            launched_by.update((launch.name, op) for launch in found[before:])
    return found


for arch in (90, 80, 100):
    ops, turns = OPS, []
    if arch != 90 and not everything:
        turns = sorted(by_generation & launched_by.keys())[0 if arch == 80 else 4 :: 8]
        ops = list({launched_by[name].name: launched_by[name] for name in turns}.values())
    first = {launch.name: launch for launch in reversed(launches(arch, arch == 90, ops))}
    chosen = {launch.way: launch for launch in launches(arch, False)} if everything else {}
    if arch == 90:
        chosen |= {name: launch for name, launch in first.items() if name not in elsewhere}
        assert elsewhere <= first.keys()
    else:
        chosen |= {name: first[name] for name in turns if name in first}
    for launch in chosen.values():
        compiled = launch.compiled()
        assert compiled.asm["cubin"], launch.name
        assert compiled.metadata.shared <= SHARED[arch] or arch < 90, launch.name
        early = compiled.asm.get("ttir", "tt.dot")
        if any(word in early for word in ("tt.dot", "inline_asm", "extern_elementwise")):
            by_generation.add(launch.name)
    print("compiled", len(chosen), "of", len(first), "kernels for", arch)
assert assembled >= 6, assembled
"""


def test_kernels_compile(tmp_path: Path):
    many = "all" if EVERYTHING else "some"
    lines = [line.split() for line in in_a_process(CHECK, tmp_path, many).splitlines()]
    kernels = {int(line[-1]): int(line[1]) for line in lines}
    assert kernels.keys() == {80, 90, 100} and kernels[90] >= 45 and min(kernels.values()) >= 1


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
