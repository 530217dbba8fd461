"""One row times 4-bit weights on the tensor cores: no interpreter runs it, so it is emulated, compiled and read."""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from accel_kernels import Norm  # noqa: E402
from accel_kernels.gemm import epilogue_triton as epilogue
from accel_kernels.gemm.quantized import gemv_mma_triton as gemv_mma
from accel_kernels.gemm.quantized import write_triton as quantized_write
from accel_kernels.gemm.quantized.gemv_mma_triton import GemvTile  # noqa: E402
from accel_kernels.gemm.quantized.operands import mma_operands_triton as fragments
from accel_kernels.gemm.quantized.quantized_linear import INT4, INT8, quantized_linear  # noqa: E402
from accel_kernels.gemm.quantized_weight import quantize_weight  # noqa: E402

from support.kernels.quantized_words import numbers_of, spread  # noqa: E402
from support.kernels.warpgroups import Array, Gluon, Pointer, rebuilt  # noqa: E402


def device():
    machine = Gluon(True)
    wait = SimpleNamespace(gdc_wait=lambda: None, gdc_launch_dependents=lambda: None)
    names = rebuilt(
        (fragments, epilogue, quantized_write, gemv_mma), gl=machine, mma_v2=machine.mma_v2, middle=lambda *_: 136,
        pairs=numbers_of("int4", False, 136), _spread=spread, tl=machine.triton(wait),
        range=lambda *to: map(Array, range(*map(int, to))), COLUMNS=128,
        activate=lambda y, kind: Array(np.maximum(y.data, 0)) if kind == "relu" else y,
        **dict.fromkeys(("words_layout", "x_layout", "squares_layout"), lambda *_: None),
    )  # fmt: skip
    return machine, names["gemv_mma_kernel"]


def launch(jitted, grid, *args, **flags):
    """What `warmup.launch` does, in float64; what no program writes stays NaN."""
    machine, kernel = device()
    (machine.programs,) = grid

    def value(given):
        if not isinstance(given, torch.Tensor):
            return given
        data = given.reshape(-1).numpy() if given.dtype == torch.int32 else given.double().numpy().reshape(-1)
        return Pointer(data.astype(np.int64) & 0xFFFFFFFF if given.dtype == torch.int32 else data)

    values = [value(given) for given in args]
    y = jitted.arg_names.index("y_ptr")
    values[y].memory[:] = np.nan
    for program in range(machine.programs):
        machine.program = program
        kernel(*values, **{name: flag for name, flag in flags.items() if name != "maxnreg"})
    args[y].copy_(torch.from_numpy(values[y].memory).view_as(args[y]))


# columns, outputs, group, zeros, gate, norm, and warps, spans ahead, programs
CASES = {
    "groups of 64, rms": (1024, 70, 64, False, False, "rms", (4, 4, 2)),
    "groups of 64, gate, zeros": (512, 50, 64, True, True, "gemma", (8, 4, 1)),
    "groups of 128, uneven": (1664, 83, 128, False, False, "none", (2, 5, 1)),
    "groups of 128, gate, a block a program": (2048, 41, 128, False, True, "rms", (2, 3, 4)),
    "groups of 32, zeros": (640, 20, 32, True, False, "layer", (4, 1, 1)),
    "a scale a row, spans for some warps alone": (640, 40, 0, False, False, "rms", (4, 4, 1)),
    "groups of 384, gate, zeros": (768, 24, 384, True, True, "none", (16, 4, 1)),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernel")
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_emulated(case, monkeypatch):
    k, n, group, zeros, gate, norm, tile = case
    generator = torch.Generator().manual_seed(0)

    def rand(*size):
        return torch.randn(*size, generator=generator).bfloat16()

    weight, up = (quantize_weight(rand(n, k) * k**-0.5 + (0.01 if zeros else 0), INT4, group, zeros) for _ in range(2))
    norms = {"none": None, "rms": Norm(rand(k), None, 1e-5), "gemma": Norm(rand(k), None, 1e-6, offset=1.0)}
    norms["layer"] = Norm(rand(k), rand(k), 1e-5, centred=True)
    more = {"norm": norms[norm], "residual": rand(1, n), "scale": 0.5, "activation": "relu"}
    more |= {"up": up, "up_bias": rand(n)} if gate else {}
    x, bias = rand(1, k), rand(n)
    assert gemv_mma.refusal(x, weight, more.get("up")) is None
    monkeypatch.setattr(gemv_mma, "launch", launch)
    found = quantized_linear.triton(x, weight, bias, **more, shape=GemvTile(*tile))
    wide = {name: one.double() if isinstance(one, torch.Tensor) else one for name, one in more.items()}
    if more["norm"] is not None:
        parts = (one.double() if isinstance(one, torch.Tensor) else one for one in more["norm"])
        wide["norm"] = Norm(*parts)
    wanted = quantized_linear.reference(x.double(), weight, bias.double(), **wide)
    theirs = (quantized_linear.reference(x, weight, bias, **more).double() - wanted).abs().max()
    assert (found.double() - wanted).abs().max() <= 2 * theirs


def test_tiles():
    """A factor of x to a warp, programs for all multiprocessors; and what does not fit is left to another kernel."""
    for n, k, group, gate in ((6144, 4096, 64, False), (12288, 4096, 128, True), (4096, 14336, 128, False)):
        tile = gemv_mma.gemv_tile(n, k, group, gate, 132)
        assert tile.warps * tile.programs == 16
        assert gemv_mma.steps_of(k, tile.warps) * max(1, 128 // group) <= 8
    assert gemv_mma.gemv_tile(4096, 14336, 64, False, 132) is None


def test_refusals():
    x, weight = torch.randn(1, 256).bfloat16(), quantize_weight(torch.randn(64, 256).bfloat16(), INT4, 64)
    assert gemv_mma.refusal(x, weight, None) is None
    wide = weight._replace(scales=weight.scales.float())
    narrow = quantize_weight(torch.randn(64, 192).bfloat16(), INT4, 64)
    assert "scales of torch.float32" in gemv_mma.refusal(x, wide, None)
    assert "2 rows" in gemv_mma.refusal(x.expand(2, 256), weight, None)
    assert "192 columns" in gemv_mma.refusal(x[:, :192], narrow, None)
    assert "not of 4 bits" in gemv_mma.refusal(x, quantize_weight(torch.randn(64, 256), INT8), None)
    long = quantize_weight(torch.randn(64, 2304).bfloat16(), INT4, 64)
    with pytest.raises(ValueError, match="4 warps to 2304 columns: 5 spans of 2 scales each"):
        quantized_linear.triton(torch.randn(1, 2304).bfloat16(), long, shape=GemvTile(4, 4, 4))
    assert "multiple of 16 bytes" in gemv_mma.refusal(torch.randn(260).bfloat16()[1:257], weight, None)


CHECK = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from accel_kernels.gemm.quantized.gemv_mma_triton import GemvTile, compile_case

kernel, types, constants, warps = compile_case(1024, 64, True, False, False, GemvTile(4, 4, 4))
signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
target, options = GPUTarget("cuda", 90, 32), {"num_warps": warps}
ptx = triton.compile(GluonASTSource(kernel, signature, constants, aligned), target, options).asm["ptx"]
walk = ptx[ptx.index("mma.sync"):ptx.rindex("mma.sync")]
assert "m16n8k16" in walk and "shared" not in walk and "bar.sync" not in walk
# Words by 16 bytes; of the two spans of a warp in a block, and of as many ahead.
assert len(re.findall(r"ld.global[.a-zA-Z0-9:_]*evict_first[.a-zA-Z0-9:_]*.v4.b32", ptx)) == 2 * 2 * 3
print("registers")
"""


def test_between_the_products_nothing_passes_through_shared_memory(tmp_path):
    environment = dict(os.environ, TRITON_CACHE_DIR=str(tmp_path), PYTHONPATH="kernels", TRITON_DEFAULT_FP_FUSION="1",
                       TRITON_DISABLE_LINE_INFO="1")  # fmt: skip
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "registers", done.stderr[-2000:]
