"""Every kernel compiles for the GPUs we name, on a machine without one.

For compute capability 9.0 the first case of a kernel, the dtypes in turn where cases differ by dtype alone.
Of the kernels that hold what is compiled by generation, products of matrices and instructions written out, every second
once more for one of the others, in turn: its last case. ACCEL_TEST_EVERYTHING=1 compiles all for all.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

CHECK = """
import importlib, pkgutil, sys
import accel_kernels as package
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

everything = sys.argv[1:] == ["all"]
found = pkgutil.walk_packages(package.__path__, "accel_kernels.")
modules = [importlib.import_module(info.name) for info in found if info.name.endswith("_triton")]
by_generation = set()


def build(target, kernel, types, constants, warps, *stages):
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    constexprs = {name: constants[name] for name in kernel.arg_names if name in constants}
    options = {"num_warps": warps} | ({"num_stages": stages[0]} if stages else {})
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    compiled = triton.compile(source(kernel, signature, constexprs), target=target, options=options)
    assert compiled.asm["cubin"], kernel.__name__
    assert compiled.metadata.shared <= 232448 or target.arch < 90, kernel.__name__
    early = compiled.asm.get("ttir", "tt.dot")
    if any(word in early for word in ("tt.dot", "inline_asm", "extern_elementwise")):
        by_generation.add(kernel.__name__)


def chosen(cases, which):
    several, kinds = {}, {}
    for kernel, _, *rest in cases:
        found = several.setdefault(kernel, [])
        found.append(rest) if rest not in found else None
    for case in cases:
        kernel, _, *rest = case
        alike = [other for other in cases if other[0] is kernel and [*other[2:]] == rest]
        kind = kinds.setdefault((kernel.__name__, str(rest)), len(kinds))
        if rest == several[kernel][which] and alike[kind % len(alike)] is case:
            yield case


for arch in (90, 80, 100):
    seen, count = set(), 0
    for module in modules:
        float8 = getattr(module, "FLOAT8_COMPILE_CASES", ()) if arch >= 89 else ()
        cases = (*getattr(module, "COMPILE_CASES", ()), *float8)
        for case in cases if everything else chosen(cases, 0 if arch == 90 else -1):
            name = case[0].__name__
            turn = name in by_generation and sorted(by_generation).index(name) % 4 == (0 if arch == 80 else 2)
            if everything or arch == 90 or (turn and name not in seen):
                build(GPUTarget("cuda", arch, 32), *case)
                seen.add(name)
                count += 1
    print("compiled", count, "of", len(seen), "kernels for", arch)
"""


def test_kernels_compile(tmp_path):
    environment = dict(os.environ, TRITON_CACHE_DIR=str(tmp_path), PYTHONPATH="kernels", TRITON_DEFAULT_FP_FUSION="1",
                       TRITON_DISABLE_LINE_INFO="1")  # fmt: skip
    environment.pop("TRITON_INTERPRET", None)
    many = "all" if os.environ.get("ACCEL_TEST_EVERYTHING") else "some"
    done = subprocess.run([sys.executable, "-c", CHECK, many], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    kernels = {int(line[-1]): int(line[3]) for line in lines}
    assert kernels.keys() == {80, 90, 100} and kernels[90] >= 29 and min(kernels.values()) >= 2
