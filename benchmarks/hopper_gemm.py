"""The product by specialized warps at the sizes of Flux, SDXL and Llama-3.1-8B, on a Hopper GPU.

python benchmarks/hopper_gemm.py OUT.json [--only WORD]: TFLOP/s by product: cuBLASLt's best algorithm without what
follows, hopper_gemm without and with it, and the library's product between passes; then int8, beside int8_linear's own
tiles, and fp8, beside fp8_linear. A kernel is timed only when its result is right: off float32 by at most twice what
torch is. What fails is told and leaves the others be.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from accel_kernels import Quantized, hopper_gemm, int8_linear, quantize_rows
from accel_kernels.gemm import cublaslt
from accel_kernels.gemm.fp8_linear import in_passes
from accel_kernels.gemm.int8_linear_triton import chosen
from accel_kernels.warmup import warmup

from accel.bench.machine import commit, machine, now

DEVICE, DTYPE, FP8 = torch.device("cuda"), torch.bfloat16, torch.float8_e4m3fn
ALGORITHMS, SECONDS, ROUNDS = 8, 3e-3, 4
GELU, TANH, SILU = "gelu", "gelu_tanh", "silu"
PRODUCTS = {  # rows, outputs, inputs, what follows
    "flux qkv": (4096, 9216, 3072, {"bias"}),
    "flux out": (4096, 3072, 3072, {"bias", "modulation", "residual"}),
    "flux up": (4096, 12288, 3072, {"bias", TANH}),
    "flux down": (4096, 3072, 12288, {"bias", "modulation", "residual"}),
    "flux single in": (4608, 21504, 3072, {"bias"}),
    "flux single up": (4608, 12288, 3072, {"bias", TANH}),
    "flux single out": (4608, 3072, 15360, {"bias", "modulation", "residual"}),
    "flux text qkv": (512, 9216, 3072, {"bias"}),
    "flux text up": (512, 12288, 3072, {"bias", TANH}),
    "sdxl geglu 64": (8192, 2560, 640, {"bias", "gate", GELU}),
    "sdxl down 64": (8192, 640, 2560, {"bias", "residual"}),
    "sdxl out 64": (8192, 640, 640, {"bias", "residual"}),
    "sdxl geglu 32": (2048, 5120, 1280, {"bias", "gate", GELU}),
    "sdxl down 32": (2048, 1280, 5120, {"bias", "residual"}),
    "sdxl out 32": (2048, 1280, 1280, {"bias", "residual"}),
    "sdxl qkv 32": (2048, 3840, 1280, set()),
    "llama qkv": (2048, 6144, 4096, set()),
    "llama out": (2048, 4096, 4096, {"residual"}),
    "llama gate-up": (2048, 14336, 4096, {"gate", SILU}),
    "llama down": (2048, 4096, 14336, {"residual"}),
}
EIGHT_BITS = ("flux up", "llama qkv", "llama gate-up", "llama down")


def rand(*shape: int, spread: float = 1.0) -> torch.Tensor:
    return torch.empty(shape, device=DEVICE, dtype=DTYPE).normal_(0, spread)


def graphed(run: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of several runs, and how many."""
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    repeats = max(1, min(50, int(SECONDS / (time.perf_counter() - start))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    return graph, repeats


def milliseconds(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median of a few rounds in which all take turns: the clock follows the temperature and the power."""
    graphs = {name: graphed(run) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(ROUNDS + 1):  # the first one warms up
        for name, (graph, repeats) in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn:
                times[name].append(begin.elapsed_time(end) / repeats)
    return {name: statistics.median(found) for name, found in times.items()}


class Problem:
    """A product, its operands and what follows it."""

    def __init__(self, name: str, kind: torch.dtype | None = None):
        """kind: of 8 bits, or None."""
        self.rows, self.n, self.k, self.after = PRODUCTS[name]
        self.gate = "gate" in self.after
        self.columns = self.n * (2 if self.gate else 1)
        x, both = rand(self.rows, self.k), rand(self.columns, self.k, spread=self.k**-0.5)
        self.x, self.both, self.kind = x, both, kind
        weights = list(both.split(self.n))
        if kind is not None:
            self.x = quantize_rows(x, dtype=kind)
            weights = [Quantized(r.data, r.scales) for r in (quantize_rows(w, dtype=kind) for w in weights)]
        shifts = list(rand(self.columns).split(self.n)) if "bias" in self.after else [None, None]
        self.args = self.x, weights[0], shifts[0]
        self.given = {"activation": next((one for one in self.after if one in (GELU, TANH, SILU)), None)}
        if self.gate:
            self.given |= {"up": weights[1], "up_bias": shifts[1]}
        if "residual" in self.after:
            self.given["residual"] = rand(self.rows, self.n)
        if "modulation" in self.after:
            self.given["modulation"] = rand(1, self.n)

    def rate(self, ms: float) -> float:
        return round(2e-9 * self.rows * self.columns * self.k / ms, 1)

    @property
    def plain(self) -> tuple[tuple, dict]:
        """The product alone, of both weights where there is a gate."""
        if self.kind is None:
            return (self.x, self.both), {}
        return (self.x, self.args[1]), {}

    def algorithms(self) -> dict[str, Callable[[], object]]:
        """cuBLASLt's, by name."""
        cublaslt.CANDIDATES = ALGORITHMS
        product = cublaslt.Product(cublaslt.CublasLt(), self.rows, self.columns, self.k, DTYPE, bias=False)
        y = torch.empty(self.rows, self.columns, device=DEVICE, dtype=DTYPE)

        def run(rank: int) -> Callable[[], object]:
            return lambda: product.run(rank, self.x, self.both, None, None, y)

        return {f"cuBLASLt {rank}": run(rank) for rank in range(len(product.algorithms))}

    @property
    def own_tile(self):
        """Of `int8_linear`, where hopper_gemm does not run in its place."""
        return chosen(self.rows, self.n, self.k, self.gate, DEVICE)


def exact(args: tuple, given: dict) -> tuple[torch.Tensor, float]:
    """In float32, and the largest error of torch's own in 16 bits."""
    if isinstance(args[0], torch.Tensor):
        wide = [None if one is None else one.float() for one in args]
        more = {name: one.float() if isinstance(one, torch.Tensor) else one for name, one in given.items()}
        found = hopper_gemm.reference(*wide, **more)
        return found, float((hopper_gemm.reference(*args, **given).float() - found).abs().max())
    x, weight, bias = (*args, None)[:3]
    more = {name: one.dequantized(torch.float32) if isinstance(one, Quantized) else one for name, one in given.items()}
    more = {name: one.float() if isinstance(one, torch.Tensor) else one for name, one in more.items()}
    shift = None if bias is None else bias.float()
    found = hopper_gemm.reference(x.dequantized(torch.float32), weight.dequantized(torch.float32), shift, **more)
    return found, float((found.bfloat16().float() - found).abs().max())


Runs = dict[str, tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, float] | None]]


def measured(problem: Problem, runs: Runs) -> dict[str, float | str]:
    """TFLOP/s, or why not. runs: what is called, what it should give and how far torch's own is off."""
    found: dict[str, float | str] = {}
    for name, (call, right) in runs.items():
        try:
            y = call()
            torch.cuda.synchronize()
            off = 0.0 if right is None else float((y.float() - right[0]).abs().max())
            if right is not None and not off <= 2 * right[1] + 1e-6:
                found[name] = f"wrong by {off:.2e}, torch by {right[1]:.2e}"
        except Exception as reason:
            found[name] = f"{type(reason).__name__}: {str(reason)[:200]}"
    times = milliseconds({name: call for name, (call, _) in runs.items() if name not in found})
    return found | {name: problem.rate(ms) for name, ms in times.items()}


def best(found: dict[str, float | str], prefix: str) -> tuple[str, float]:
    """Of those whose names begin so, the fastest."""
    rates = {name: one for name, one in found.items() if name.startswith(prefix) and isinstance(one, float)}
    name = max(rates, key=rates.__getitem__)
    return name, rates[name]


def products(name: str) -> dict:
    torch.manual_seed(0)
    problem = Problem(name)
    args, given = problem.args, problem.given
    runs: Runs = {name: (run, None) for name, run in problem.algorithms().items()}
    plain, whole = exact(*problem.plain), exact(args, given)
    runs["plain"] = partial(hopper_gemm.triton, *problem.plain[0]), plain
    runs["whole"] = partial(hopper_gemm.triton, *args, **given), whole
    runs["passes"] = partial(hopper_gemm.instead, *args, **given), (whole[0], 4 * whole[1])
    found = measured(problem, runs)
    rank, rate = best(found, "cuBLASLt")
    return {"TFLOP/s": found, "best of cuBLASLt": rank} | {
        f"{kind} of its": round(found[kind] / rate, 3) for kind in ("plain", "whole") if isinstance(found[kind], float)
    }


def in_eight_bits(name: str, kind: torch.dtype) -> dict:
    torch.manual_seed(0)
    problem = Problem(name, kind)
    args, given = problem.args, problem.given
    right = exact(args, given)
    loose = right[0], 20 * right[1]
    if kind == FP8:
        runs: Runs = {"hopper_gemm, fast": (partial(hopper_gemm.triton, *args, **given, fast=True), loose)}
        for fast in (False, True):
            runs["fp8_linear" + ", fast" * fast] = partial(in_passes, *args, **given, fast=fast), loose
    else:
        runs = {
            "hopper_gemm": (partial(hopper_gemm.triton, *args, **given), right),
            "int8_linear, own tile": (partial(int8_linear.triton, *args, **given, shape=problem.own_tile), loose),
        }
    return {"TFLOP/s": measured(problem, runs)}


def compile_all(names: list[str]) -> None:
    """At once, in threads; what is launched does not run."""
    problems = [(name, None) for name in names]
    problems += [(name, kind) for name in names if name in EIGHT_BITS for kind in (torch.int8, FP8)]
    with warmup():
        for name, kind in problems:
            problem = Problem(name, kind)
            args, given = problem.args, problem.given
            hopper_gemm.triton(*args, **given, fast=kind == FP8)
            if kind is None:
                hopper_gemm.triton(*problem.plain[0])
            elif kind == torch.int8:
                int8_linear.triton(*args, **given, shape=problem.own_tile)


def main(path: Path, only: str) -> None:
    start = time.perf_counter()
    names = [name for name in PRODUCTS if only in name]
    compile_all(names)
    result: dict = {"case": "hopper-gemm", "date": now(), "commit": commit(), "machine": machine(DEVICE)}
    result["unit"] = "TFLOP/s"
    result["compiled_s"] = round(time.perf_counter() - start, 1)
    result["products"], result["eight bits"] = {}, {}
    for name in names:
        result["products"][name] = found = products(name)
        print(name, PRODUCTS[name][:3], json.dumps(found), flush=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
    for name in (name for name in names if name in EIGHT_BITS):
        for kind in (torch.int8, FP8):
            found = result["eight bits"][f"{name} {str(kind)[6:]}"] = in_eight_bits(name, kind)
            print(name, kind, json.dumps(found), flush=True)
            path.write_text(json.dumps(result, indent=1) + "\n")
    result["took_s"] = round(time.perf_counter() - start, 1)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print("took", result["took_s"], "compiled in", result["compiled_s"])


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.no_grad():
        main(Path(sys.argv[1]), sys.argv[sys.argv.index("--only") + 1] if "--only" in sys.argv else "")
