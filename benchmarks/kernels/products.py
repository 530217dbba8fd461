"""Products of the shapes of language models and diffusion transformers: every kernel, format and tile, beside torch.

`--study` names what is multiplied: few-rows, one-row, four-bits, many-rows, crossover, eight-bits, outliers, hopper.
Norm, gate, residual and bias are included, weights are distinct and larger together than the cache. A way is timed only
where its error against float32 is at most twice that of torch in the same dtype, of rows in 8 bits somewhat more, as
sums in other orders are. `whole`: false for a part of a product. `sums`: of a model's layers, in milliseconds. `from`,
of the crossover: from how many rows on rounding them is faster all the way. `--tiles`: others than those chosen, too.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from accel_kernels import Norm, fp8_linear, fused_linear, hopper_gemm, int8_linear, quantize_rows, quantized_linear
from accel_kernels.gemm import cublaslt
from accel_kernels.gemm.fp8_linear import in_passes as fp8_in_passes
from accel_kernels.gemm.fused_linear import in_passes as full_in_passes
from accel_kernels.gemm.int8_linear import in_passes as int8_in_passes
from accel_kernels.gemm.int8_linear import integer_product
from accel_kernels.gemm.linear import LinearChooser
from accel_kernels.gemm.quantize_rows import SHARE, QuantizedRows
from accel_kernels.gemm.quantized.quantized_linear import in_passes as quantized_in_passes
from accel_kernels.gemm.quantized_weight import quantize_weight

from benchmarks.kernels.tiles import named, tiles_of
from benchmarks.kernels.timer import compile_ahead, rand, times_us
from benchmarks.study import DEVICE, TOY, Study, numbers

FP8 = torch.float8_e4m3fn
UNIT = 64 if TOY else 1  # what toy sizes are smaller by
LEAST_BYTES = 0 if TOY else 3e8  # of weights to a measurement
ALGORITHMS = 8  # of cuBLASLt, of which the best counts
FORMATS = {"bf16": None, "int8": (torch.int8, 0), "fp8": (FP8, 0)}
FORMATS |= {"int4": (torch.int32, 32 if TOY else 128), "int4-g64": (torch.int32, 64)}
# The error that a way may have, by torch's: sums of float8 in shorter accumulators, passes that round in between.
ALLOWED = {"fp8": 20.0, "int8": 4.0, "bf16": 2.0}


class Sizes(NamedTuple):
    """Outputs and inputs of a product, and what stands before and after it."""

    n: int
    k: int
    gate: bool = False
    norm: bool = False
    residual: bool = False
    bias: bool = False
    modulation: bool = False
    activation: str | None = None


class Shape(NamedTuple):
    """Of a language model: hidden and inner channels, outputs for queries, keys and values, words, layers."""

    hidden: int
    inner: int
    qkv: int
    words: int
    layers: int

    @property
    def products(self) -> dict[str, Sizes]:
        hidden, inner = self.hidden, self.inner
        return {
            "qkv": Sizes(self.qkv, hidden, norm=True),
            "out": Sizes(hidden, hidden, residual=True),
            "gate-up": Sizes(inner, hidden, gate=True, norm=True, activation="silu"),
            "down": Sizes(hidden, inner, residual=True),
        }


SHAPES = {
    "llama-8b": Shape(4096, 14336, 6144, 128256, 32),
    "qwen3-8b": Shape(4096, 12288, 6144, 151936, 36),
    "narrow": Shape(1024, 4096, 1536, 8192, 32),
}
_BACK = {"bias": True, "residual": True}
_SDXL = {"bias": True, "gate": True, "activation": "gelu"}
HOPPER: dict[str, tuple[int, Sizes]] = {  # rows and sizes
    "flux qkv": (4096, Sizes(9216, 3072, bias=True)),
    "flux out": (4096, Sizes(3072, 3072, modulation=True, **_BACK)),
    "flux up": (4096, Sizes(12288, 3072, bias=True, activation="gelu_tanh")),
    "flux down": (4096, Sizes(3072, 12288, modulation=True, **_BACK)),
    "flux single in": (4608, Sizes(21504, 3072, bias=True)),
    "flux single up": (4608, Sizes(12288, 3072, bias=True, activation="gelu_tanh")),
    "flux single out": (4608, Sizes(3072, 15360, modulation=True, **_BACK)),
    "flux text qkv": (512, Sizes(9216, 3072, bias=True)),
    "flux text up": (512, Sizes(12288, 3072, bias=True, activation="gelu_tanh")),
    "sdxl geglu 64": (8192, Sizes(2560, 640, **_SDXL)),
    "sdxl down 64": (8192, Sizes(640, 2560, **_BACK)),
    "sdxl out 64": (8192, Sizes(640, 640, **_BACK)),
    "sdxl geglu 32": (2048, Sizes(5120, 1280, **_SDXL)),
    "sdxl down 32": (2048, Sizes(1280, 5120, **_BACK)),
    "sdxl out 32": (2048, Sizes(1280, 1280, **_BACK)),
    "sdxl qkv 32": (2048, Sizes(3840, 1280)),
    **{f"llama {name}": (2048, sizes._replace(norm=False)) for name, sizes in SHAPES["llama-8b"].products.items()},
}


class Product:
    """Weights of one product in one format: sets of one, or of one and its gate's. sets: how many."""

    def __init__(self, sizes: Sizes, format: str = "bf16", sets: int = 0):
        self.sizes, self.format, self.n, self.k = sizes, format, sizes.n // UNIT, sizes.k // UNIT
        first = [self._weight() for _ in range(1 + sizes.gate)]
        self.nbytes = sum(one.nbytes for one in first)
        sets = sets or max(2, -(-int(LEAST_BYTES) // self.nbytes))
        # Few random matrices, copied: quantizing so many would take minutes.
        self.sets = [first, *([self._copy(one) for one in first] for _ in range(sets - 1))]

    def _weight(self):
        full = rand(self.n, self.k, spread=self.k**-0.5)
        return full if FORMATS[self.format] is None else quantize_weight(full, *FORMATS[self.format])

    def _copy(self, one):
        return one.clone() if isinstance(one, torch.Tensor) else one.each(torch.clone)

    def given(self, rows: int) -> dict:
        """What stands before and after the product, as arguments; the same for the same number of rows."""
        torch.manual_seed(rows)
        sizes, found = self.sizes, {"activation": self.sizes.activation}
        if sizes.norm:
            found["norm"] = Norm(rand(self.k), None, 1e-5)
        if sizes.residual:
            found["residual"] = rand(rows, self.n)
        if sizes.modulation:
            found["modulation"] = rand(1, self.n)
        if sizes.bias:
            found |= {"bias": rand(self.n)} | ({"up_bias": rand(self.n)} if sizes.gate else {})
        return found

    def call(self, op: Callable, x, weights: list, given: dict, **more) -> torch.Tensor:
        gate = {"up": weights[1]} if self.sizes.gate else {}
        return op(x, weights[0], **gate, **given, **more)

    def exact(self, x, given: dict) -> torch.Tensor:
        """In float32, of the first set."""
        wide = [
            one.float() if isinstance(one, torch.Tensor) else one.dequantized(torch.float32) for one in self.sets[0]
        ]
        given = {name: one.float() if isinstance(one, torch.Tensor) else one for name, one in given.items()}
        if "norm" in given:
            given["norm"] = given["norm"]._replace(weight=given["norm"].weight.float())
        x = x.dequantized(torch.float32) if isinstance(x, QuantizedRows) else x.float()
        return self.call(fused_linear.reference, x, wide, given)

    def operations(self, rows: int) -> int:
        return 2 * rows * self.n * self.k * (1 + self.sizes.gate)


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


def ways(product: Product, x: torch.Tensor, given: dict, study: str, more: bool) -> Iterator[tuple[str, Way]]:
    """All there are for this format, by name; more: other tiles too."""
    rows, format = len(x), product.format

    def plain(op: Callable, **options) -> Way:
        return Way(lambda weights: product.call(op, x, weights, given, **options), x, given)

    if study in ("eight-bits", "outliers") and format != "bf16":
        yield from _of_rounded_rows(product, x, given, study, more)
    elif study == "hopper" and format == "bf16":
        yield from _algorithms(product, x)
        if product.call(hopper_gemm.supports, x, product.sets[0], given) is None:
            both = torch.cat(product.sets[0])
            yield "hopper_gemm, alone", Way(lambda weights: hopper_gemm.triton(x, both), x, {}, checked=False)
            yield "hopper_gemm", plain(hopper_gemm.triton)
        yield "passes", plain(hopper_gemm.instead)._replace(allowed=4.0)
    elif study == "hopper":
        yield from _of_rounded_rows(product, x, given, study, more)
    else:
        full = format == "bf16"
        yield ("torch" if full else "written out"), plain(full_in_passes if full else quantized_in_passes)
        if full and not TOY:
            yield "cublaslt", plain(full_in_passes, linear=LinearChooser())
        op = fused_linear if full else quantized_linear
        if product.call(op.supports, x, product.sets[0], given) is None or TOY:
            for tile in (None, *(tiles_of(format, rows, product.sizes.gate, product.n, product.k) if more else ())):
                yield "chosen" if tile is None else named(tile), plain(op.triton, shape=tile)
        if study == "crossover" and not full:
            kind, multiply = (FP8, fp8_linear) if format == "fp8" else (torch.int8, int8_linear)
            norm, rest = given.get("norm"), {name: one for name, one in given.items() if name != "norm"}

            def rounded(weights: list) -> torch.Tensor:
                return product.call(multiply, quantize_rows(x, norm=norm, dtype=kind), weights, rest)

            yield "rounded", Way(rounded, quantize_rows(x, norm=norm, dtype=kind), rest, ALLOWED[format])


def _of_rounded_rows(
    product: Product, x: torch.Tensor, given: dict, study: str, more: bool
) -> Iterator[tuple[str, Way]]:
    """Rows that are rounded before, which is timed by itself. 8 bits times 8 bits."""
    kind = FP8 if product.format == "fp8" else torch.int8
    threshold = 6.0 if study == "outliers" else None
    rows = quantize_rows(x, dtype=kind, outliers=threshold)
    rest = {name: one for name, one in given.items() if name != "norm"}

    def plain(op: Callable, **options) -> Way:
        call = lambda weights: product.call(op, rows, weights, rest, **options)  # noqa: E731
        return Way(call, rows, rest, ALLOWED[product.format])

    yield "rounding rows", Way(lambda weights: quantize_rows(x, dtype=kind, outliers=threshold), x, {}, checked=False)
    if kind == FP8:
        if product.call(fp8_linear.supports, rows, product.sets[0], rest) is None:
            yield "fp8_linear", plain(fp8_in_passes)
            yield "fp8_linear, fast", plain(fp8_in_passes, fast=True)
    else:
        if threshold is None:
            multiply = lambda weights: [integer_product(rows.data, one.data) for one in weights]  # noqa: E731
            yield "_int_mm", Way(multiply, rows, rest, checked=False)
            yield "_int_mm and a pass", plain(int8_in_passes)
        else:
            bare = quantize_rows(x)
            call = lambda weights: product.call(int8_linear.triton, bare, weights, rest)  # noqa: E731
            yield "int8_linear, none taken out", Way(call, bare, rest, ALLOWED["int8"], checked=False)
        yield "int8_linear", plain(int8_linear.triton)
        for tile in tiles_of("int8 x int8", len(x), product.sizes.gate, product.n, product.k) if more else ():
            yield named(tile), plain(int8_linear.triton, shape=tile)
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


def inputs_of(study: str, product: Product, rows: int) -> Iterator[tuple[dict, torch.Tensor]]:
    """What is told of it, and x (rows, K). Of outliers: by how many columns have one."""
    torch.manual_seed(rows + 1)
    x = rand(rows, product.k)
    if study != "outliers" or product.format == "bf16":
        yield {}, x
        return
    k = product.k
    for count in (0, 3, 32, k // (4 * SHARE), k // SHARE, k // SHARE + 1):
        planted = x.clamp(-4, 4)
        planted[0, torch.randperm(k, device=DEVICE)[:count]] = 20.0
        yield {"outliers": count}, planted


def measured(study: str, product: Product, rows: int, more: bool) -> Iterator[dict]:
    """A row a way: its time, or why it has none."""
    for about, x in inputs_of(study, product, rows):
        given = product.given(rows)
        found: dict[str, dict] = {}
        runs: dict[str, list[Callable]] = {}
        own: dict[bool, tuple[torch.Tensor, float]] = {}
        for name, way in ways(product, x, given, study, more):
            found[name] = {"rows": rows, "format": product.format, "way": name} | about
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
        op = full_in_passes if product.format == "bf16" else quantized_in_passes
        theirs = product.call(op, way.x, product.sets[0], way.given)
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
    "crossover": Plan(("llama-8b", "narrow"), (8, 16, 24, 32, 40, 48, 56, 64), ("int8", "fp8")),
    "eight-bits": Plan(LLAMA, (128, 512, 2048, 8192), ("bf16", "int8", "fp8")),
    "outliers": Plan(LLAMA, (2048,), ("bf16", "int8")),
    "hopper": Plan((), (), ("bf16", "int8", "fp8")),
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


def least(us: dict[str, dict[str, float]]) -> int | None:
    """The least number of rows, of those measured, from which rounding is faster all the way. us: by rows, in order."""
    found = None
    for rows, times in reversed(us.items()):
        if times["rounded"] >= times["chosen"]:
            break
        found = int(rows)
    return found


def sums(rows: list[dict]) -> dict[str, float]:
    """Milliseconds of all layers by model, rows, format and way, where it has a time for each product of a layer."""
    times: dict[tuple, dict[str, float]] = {}
    for row in (row for row in rows if "us" in row and "model" in row and not row.get("outliers")):
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


def rounding(columns: int, norm: bool) -> dict[str, float]:
    """Microseconds of rounding 2048 rows with three columns of outliers: without them, found in the call, known."""
    count, planted = (16, [3, 5, 7]) if TOY else (2048, [3, 500, 777])
    columns //= UNIT
    inputs = [rand(count, columns) for _ in range(2 if TOY else 12)]
    for x in inputs:
        x[:, planted] *= 20
    given = Norm(torch.ones(columns, device=DEVICE, dtype=torch.bfloat16), None, 1e-5) if norm else None
    known = torch.tensor(planted, device=DEVICE)
    outliers = {"none": None, "found, above 6": 6.0, "known": known}
    runs = {
        name: [partial(quantize_rows.triton, x, norm=given, outliers=one) for x in inputs]
        for name, one in outliers.items()
    }
    return {"columns": columns, "norm": norm} | times_us(runs)


def main(out: Path, study: str = "few-rows", rows: str = "", only: str = "", formats: str = "", tiles: bool = False):
    """only: products whose names have this word. rows, formats: others than those of the study."""
    plan = PLANS[study]
    kinds = formats.split(",") if formats else plan.formats
    record = Study(study, out, __doc__.splitlines()[0], rows=[], rounding=[])
    chosen = [one for one in problems(study, plan, numbers(rows) or list(plan.rows)) if only in one[0]["product"]]
    for about, sizes, counts in chosen:
        for format in kinds:
            product = Product(sizes, format, 1 if study == "hopper" else 0)
            compile_ahead([partial(way.call, product.sets[0]) for count in counts
                           for _, x in inputs_of(study, product, count)
                           for _, way in ways(product, x, product.given(count), study, tiles)])  # fmt: skip
            for count in counts:
                for row in measured(study, product, count, tiles):
                    record.add("rows", about | row)
            del product
    if study == "outliers":
        for columns, norm in ((4096, True), (4096, False), (14336, False)):
            record.add("rounding", rounding(columns, norm))
    record.body["sums"] = sums(record.body["rows"])
    if study == "crossover":
        record.body["from"] = _crossovers(record.body["rows"])
    record.save()
    record.show(record.body["sums"], record.body.get("from", ""))


def _crossovers(rows: list[dict]) -> dict[str, int | None]:
    us: dict[str, dict[str, dict[str, float]]] = {}
    for row in (row for row in rows if "us" in row):
        of = us.setdefault(f"{row['model']} {row['product']} {row['format']}", {})
        of.setdefault(str(row["rows"]), {})[row["way"]] = row["us"]
    whole = {name: {n: one for n, one in of.items() if {"rounded", "chosen"} <= one.keys()} for name, of in us.items()}
    return {name: least(of) for name, of in whole.items()}
