"""Kernels compiled in processes beside this one: this one finds them, and is never worse off than without."""

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from accel_kernels.compiling.compilers_triton import Compilers, compilers_of

from support.kernels.compiler import in_a_process

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

hits = []
knobs.compilation.listener = lambda src, cache_hit, **more: hits.append((src.name, cache_hit))
with absent_gpu(90) as found:
    for op in (rowwise, upsample):
        args, more = op.cases[-1].make(GPU, torch.bfloat16)
        assert op.supports(*args, **more) is None
        op.triton(*args, **more)
kernels = list({launch.name: launch for launch in found}.values())


def compiled(kernels):
    compilers = Compilers(2)
    with ThreadPoolExecutor(3) as threads, CompileBeside(threads, compilers):
        made = [launch.compiled() for launch in kernels]
    started = compilers._process is not None
    compilers.close()
    assert all(len(_ready(one).asm["cubin"]) > 100 for one in made)
    return compilers.compiled, started


first = compiled(kernels)
assert first == (len(kernels), True), first
assert hits and all(hit for _, hit in hits), hits  # what they compiled is what is looked for here
for launch in kernels:
    launch.kernel.device_caches.clear()
again = compiled(kernels)
assert again == (0, False), again  # all are there: nothing is started
scope = {"triton": triton, "tl": triton.language}
text = pathlib.Path(sys.argv[1]).read_text()
exec(compile(text, sys.argv[1], "exec"), scope)  # in no module that could be imported there
unknown = found[0]._replace(kernel=scope["lonely"], args=(triton.MockTensor(torch.float32),), meta={})
assert compiled([unknown])[0] == 0 and hits[-1] == ("lonely", False), hits[-1]
print(sorted(launch.name for launch in kernels))
"""
LONELY = "@triton.jit\ndef lonely(x_ptr):\n    tl.store(x_ptr, 0.0)\n"


def test_what_they_compile_is_found(tmp_path: Path):
    file = tmp_path / "lonely.py"
    file.write_text(LONELY)
    assert in_a_process(COMPILED, tmp_path, str(file)).strip() == str(["rowwise_kernel", "upsample_kernel"])


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


def test_what_does_not_compile_ends_nothing_else():
    compilers = Compilers(2)
    try:
        assert [compilers.compile(b"no pickle") for _ in range(2)] == [False, False]
        assert compilers._process.poll() is None
    finally:
        compilers.close()


def test_a_forked_process_has_its_own():
    assert compilers_of(os.getpid()) is compilers_of(os.getpid())
    assert compilers_of(os.getpid()) is not compilers_of(os.getppid())
