"""Products of the shapes of language models and diffusion transformers: every kernel, format and tile, beside torch.

`--study` names what is multiplied: few-rows, one-row, four-bits, many-rows, eight-bits, hopper, blocks.
Norm, gate, residual and bias are included, weights are distinct and larger together than the cache. A way is timed only
where its error against float32 is at most twice that of torch in the same dtype, of rows in 8 bits somewhat more, as
sums in other orders are. `whole`: false for a part of a product. `sums`: of a model's layers, in milliseconds.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from accel_kernels import fp8_linear, hopper_gemm, int8_linear, quantize_rows
from accel_kernels.gemm import cublaslt
from accel_kernels.gemm.fp8_linear import in_passes as fp8_in_passes
from accel_kernels.gemm.fused_linear import in_passes as full_in_passes
from accel_kernels.gemm.int8_linear import in_passes as int8_in_passes
from accel_kernels.gemm.int8_linear import integer_product
from accel_kernels.gemm.linear import LinearChooser
from accel_kernels.gemm.quantize_rows import QuantizedRows

from benchmarks.kernels.shapes import FP8, HOPPER, SHAPES, UNIT, Product, Sizes
from benchmarks.kernels.timer import compile_ahead, rand, times_us
from benchmarks.study import DEVICE, TOY, Study, numbers

ALGORITHMS = 8  # of cuBLASLt, of which the best counts
# The error that a way may have, by torch's: sums of float8 in shorter accumulators, passes that round in between.
ALLOWED = {"fp8": 20.0, "int8": 4.0, "bf16": 2.0}


class Way(NamedTuple):
    """A way to multiply: `call(weights)`.

    x, given: what its exact result is of. allowed: how far off it may be, by torch's own error. checked: whether it is
    the whole product, and not a part of it.
    """

    call: Callable[[list], torch.Tensor]
    x: torch.Tensor | QuantizedRows
    given: dict
    allowed: float = ALLOWED["bf16"]
    checked: bool = True


def ways(product: Product, x: torch.Tensor, given: dict, study: str) -> Iterator[tuple[str, Way]]:
    """All there are for this format, by name."""
    format = product.format

    def plain(op: Callable, **options) -> Way:
        return Way(lambda weights: product.call(op, x, weights, given, **options), x, given)

    if study == "eight-bits" and format != "bf16":
        yield from _of_rounded_rows(product, x, given)
    elif study == "hopper" and format == "bf16":
        yield from _algorithms(product, x)
        if product.call(hopper_gemm.supports, x, product.sets[0], given) is None:
            both = torch.cat(product.sets[0])
            yield "hopper_gemm, alone", Way(lambda weights: hopper_gemm.triton(x, both), x, {}, checked=False)
            yield "hopper_gemm", plain(hopper_gemm.triton)
        yield "passes", plain(hopper_gemm.instead)._replace(allowed=4.0)
    elif study == "hopper":
        yield from _of_rounded_rows(product, x, given)
    else:
        full, op = format == "bf16", product.op
        yield ("torch" if full else "written out"), plain(op.instead)
        if full and not TOY:
            yield "cublaslt", plain(full_in_passes, linear=LinearChooser())
        if product.call(op.supports, x, product.sets[0], given) is None or TOY:
            yield "chosen", plain(op.triton)


def _of_rounded_rows(product: Product, x: torch.Tensor, given: dict) -> Iterator[tuple[str, Way]]:
    """Rows that are rounded before, which is timed by itself. 8 bits times 8 bits."""
    kind = FP8 if product.format == "fp8" else torch.int8
    rows = quantize_rows(x, dtype=kind)
    rest = {name: one for name, one in given.items() if name != "norm"}

    def plain(op: Callable, **options) -> Way:
        call = lambda weights: product.call(op, rows, weights, rest, **options)  # noqa: E731
        return Way(call, rows, rest, ALLOWED[product.format])

    yield "rounding rows", Way(lambda weights: quantize_rows(x, dtype=kind), x, {}, checked=False)
    if kind == FP8:
        if product.call(fp8_linear.supports, rows, product.sets[0], rest) is None:
            yield "fp8_linear", plain(fp8_in_passes)
            yield "fp8_linear, fast", plain(fp8_in_passes, fast=True)
    else:
        multiply = lambda weights: [integer_product(rows.data, one.data) for one in weights]  # noqa: E731
        yield "_int_mm", Way(multiply, rows, rest, checked=False)
        yield "_int_mm and a pass", plain(int8_in_passes)
        yield "int8_linear", plain(int8_linear.triton)
    if product.call(partial(hopper_gemm.supports, fast=True), rows, product.sets[0], rest) is None:
        yield "hopper_gemm", plain(hopper_gemm.triton, fast=kind == FP8)


def _algorithms(product: Product, x: torch.Tensor) -> Iterator[tuple[str, Way]]:
    """cuBLASLt's, of both weights as one where there is a gate, without what follows."""
    if TOY:
        return
    cublaslt.CANDIDATES = ALGORITHMS
    both = torch.cat(product.sets[0])
    made = cublaslt.Product(cublaslt.CublasLt(), len(x), len(both), product.k, x.dtype, bias=False)
    y = torch.empty(len(x), len(both), device=DEVICE, dtype=x.dtype)
    for rank in range(len(made.algorithms)):
        run = lambda weights, rank=rank: made.run(rank, x, both, None, None, y)  # noqa: E731
        yield f"cuBLASLt {rank}, alone", Way(run, x, {}, checked=False)


def inputs_of(product: Product, rows: int) -> torch.Tensor:
    """(rows, K)"""
    torch.manual_seed(rows + 1)
    return rand(rows, product.k)


def measured(study: str, product: Product, rows: int) -> Iterator[dict]:
    """A row a way: its time, or why it has none."""
    x, given = inputs_of(product, rows), product.given(rows)
    found: dict[str, dict] = {}
    runs: dict[str, list[Callable]] = {}
    own: dict[bool, tuple[torch.Tensor, float]] = {}
    for name, way in ways(product, x, given, study):
        found[name] = {"rows": rows, "format": product.format, "way": name}
        try:
            if way.checked:
                rounds = isinstance(way.x, QuantizedRows)
                exact, theirs = own.get(rounds) or own.setdefault(rounds, _exact(product, way))
                off = float((way.call(product.sets[0]).float() - exact).abs().max() / exact.abs().max())
                found[name] |= {"error": off, "torch_error": theirs}
                if not off <= way.allowed * (1 + TOY) * theirs + 1e-6:  # the interpreter cuts bf16 off
                    raise ValueError(f"wrong by {off:.2e}, torch by {theirs:.2e}")
            else:
                found[name]["whole"] = False
            runs[name] = [partial(way.call, weights) for weights in product.sets]
        except Exception as error:  # a tile that needs more than the card has, or one that is wrong
            found[name]["failed"] = f"{type(error).__name__}: {str(error)[:100]}"
    timed = times_us(runs, lambda name, error, found=found: found[name].update(failed=str(error)[:100]))
    for name, us in timed.items():
        rate = product.operations(rows) / us / 1e6
        found[name] |= {"us": us, "tflop_s": round(rate, 1), "tb_s": round(product.nbytes / us / 1e6, 2)}
    yield from found.values()


def _exact(product: Product, way: Way) -> tuple[torch.Tensor, float]:
    """What it should give; and the error of torch in 16 bits, of rounded rows that of rounding the result."""
    exact = product.exact(way.x, way.given)
    if isinstance(way.x, QuantizedRows):
        theirs = exact.bfloat16()
    else:
        theirs = product.call(product.op.instead, way.x, product.sets[0], way.given)
    return exact, float((theirs.float() - exact).abs().max() / exact.abs().max())


class Plan(NamedTuple):
    """Of a study: models, rows, formats."""

    shapes: tuple[str, ...]
    rows: tuple[int, ...]
    formats: tuple[str, ...]
    head: bool = False


ALL, LLAMA = ("bf16", "int8", "int4", "fp8"), ("llama-8b",)
PLANS = {
    "few-rows": Plan(LLAMA, (1, 2, 8, 16, 32, 64), ALL, head=True),
    "one-row": Plan(("narrow",), (1,), ("bf16", "int8", "int4")),
    "four-bits": Plan(("llama-8b", "qwen3-8b"), (1, 8, 16), ("bf16", "int8", "int4", "int4-g64")),
    "many-rows": Plan(LLAMA, (96, 128, 144, 192, 256, 384, 512), ALL),
    "eight-bits": Plan(LLAMA, (128, 512, 2048, 8192), ("bf16", "int8", "fp8")),
    "hopper": Plan((), (), ("bf16", "int8", "fp8")),
    "blocks": Plan(LLAMA, (1, 2, 8, 16, 64, 128, 512, 2048), ("bf16", "nf4-nested", "Q4_K", "Q6_K", "Q8_0")),
}


def problems(study: str, plan: Plan, rows: list[int]) -> Iterator[tuple[dict, Sizes, list[int]]]:
    """What is multiplied: what is told of it, its sizes, and the numbers of rows."""
    for shape in plan.shapes:
        for name, sizes in SHAPES[shape].products.items():
            yield {"model": shape, "product": name}, sizes, rows
        if plan.head:
            yield {"model": shape, "product": "head"}, Sizes(SHAPES[shape].words, SHAPES[shape].hidden), rows
    if study == "hopper":
        for name, (count, sizes) in HOPPER.items():
            yield {"product": name}, sizes, rows or [count // UNIT]


def sums(rows: list[dict]) -> dict[str, float]:
    """Milliseconds of all layers by model, rows, format and way, where it has a time for each product of a layer."""
    times: dict[tuple, dict[str, float]] = {}
    for row in (row for row in rows if "us" in row and "model" in row):
        key = (row["model"], row["rows"], row["format"])
        times.setdefault((*key, row["way"]), {})[row["product"]] = row["us"]
        if row.get("whole", True):
            best = times.setdefault((*key, "best"), {})
            best[row["product"]] = min(row["us"], best.get(row["product"], float("inf")))
    whole = {key: of for key, of in times.items() if of.keys() >= SHAPES[key[0]].products.keys()}
    return {
        f"{model}, {count} rows, {format}, {way}": round(
            SHAPES[model].layers * sum(of[name] for name in SHAPES[model].products) / 1e3, 3
        )
        for (model, count, format, way), of in whole.items()
    }


def main(out: Path, study: str = "few-rows", rows: str = "", only: str = "", formats: str = ""):
    """only: products whose names have this word. rows, formats: others than those of the study."""
    plan = PLANS[study]
    kinds = formats.split(",") if formats else plan.formats
    record = Study(study, out, __doc__.splitlines()[0], rows=[])
    chosen = [one for one in problems(study, plan, numbers(rows) or list(plan.rows)) if only in one[0]["product"]]
    for about, sizes, counts in chosen:
        for format in kinds:
            product = Product(sizes, format, 1 if study == "hopper" else 0)
            found = (ways(product, inputs_of(product, count), product.given(count), study) for count in counts)
            compile_ahead([partial(way.call, product.sets[0]) for each in found for _, way in each])
            for count in counts:
                for row in measured(study, product, count):
                    record.add("rows", about | row)
            del product
    record.body["sums"] = sums(record.body["rows"])
    record.save()
    record.show(record.body["sums"])
