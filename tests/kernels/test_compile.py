"""Every kernel compiles for the GPUs we name, on a machine without one.

For compute capability 9.0 up to three specimens of a kernel, of those that differ by dtype alone one, the dtypes in
turn; one of each kernel for the others. ACCEL_TEST_EVERYTHING=1 compiles all.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

CHECK = """
import importlib, pkgutil, sys
import accel_kernels.triton_kernels as package
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

target = GPUTarget("cuda", int(sys.argv[1]), 32)
count, seen, kinds = 0, set(), {}
for info in pkgutil.iter_modules(package.__path__):
    module = importlib.import_module(f"{package.__name__}.{info.name}")
    float8 = getattr(module, "FLOAT8_SPECIMENS", ()) if target.arch >= 89 else ()
    specimens = (*getattr(module, "SPECIMENS", ()), *float8)
    several = {}
    for kernel, _, *rest in specimens:
        found = several.setdefault(kernel, [])
        found.append(rest) if rest not in found else None
    for specimen in specimens:
        kernel, types, constants, warps, *stages = specimen
        every = several[kernel]
        if sys.argv[2] == "kinds" and [*specimen[2:]] not in (every[0], every[len(every) // 2], every[-1]):
            continue
        alike = [other for other in specimens if other[0] is kernel and other[2:] == specimen[2:]]
        kind = kinds.setdefault((kernel.__name__, str(specimen[2:])), len(kinds))
        if sys.argv[2] == "kinds" and alike[kind % len(alike)] is not specimen:
            continue
        if sys.argv[2] == "one" and kernel.__name__ in seen:
            continue
        seen.add(kernel.__name__)
        signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
        constexprs = {name: constants[name] for name in kernel.arg_names if name in constants}
        options = {"num_warps": warps} | ({"num_stages": stages[0]} if stages else {})
        source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
        compiled = triton.compile(source(kernel, signature, constexprs), target=target, options=options)
        assert compiled.asm["cubin"], kernel.__name__
        assert compiled.metadata.shared <= 232448 or target.arch < 90, kernel.__name__
        count += 1
print("compiled", count)
"""


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernels_compile(arch, tmp_path):
    environment = dict(os.environ, TRITON_CACHE_DIR=str(tmp_path), PYTHONPATH="kernels", TRITON_DEFAULT_FP_FUSION="1",
                       TRITON_DISABLE_LINE_INFO="1")  # fmt: skip
    environment.pop("TRITON_INTERPRET", None)
    many = "all" if os.environ.get("ACCEL_TEST_EVERYTHING") else "kinds" if arch == 90 else "one"
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(arch), many], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) >= 20
