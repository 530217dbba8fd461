"""What is multiplied: products of language models and diffusion transformers, with weights in each format."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from accel_kernels import BlockWeight, Norm, fused_linear, quantized_linear
from accel_kernels.gemm.blocks.codebook import codebook_case
from accel_kernels.gemm.blocks.ggml import GGML, ggml_case
from accel_kernels.gemm.quantize_rows import QuantizedRows
from accel_kernels.gemm.quantized_weight import quantize_weight

from benchmarks.kernels.timer import rand
from benchmarks.study import TOY

FP8 = torch.float8_e4m3fn
UNIT = 64 if TOY else 1  # what toy sizes are smaller by
LEAST_BYTES = 0 if TOY else 3e8  # of weights to a measurement
FORMATS = {"bf16": None, "int8": (torch.int8, 0), "fp8": (FP8, 0)}
FORMATS |= {"int4": (torch.int32, 32 if TOY else 128), "int4-g64": (torch.int32, 64)}
BLOCKS: dict[str, Callable[[torch.Tensor], BlockWeight]] = {name: partial(ggml_case, name=name) for name in GGML}
LARGEST_BLOCK = 256  # columns
BLOCKS |= {"nf4": partial(codebook_case, name="nf4", size=64, nested=False)}
BLOCKS |= {"nf4-nested": partial(codebook_case, name="nf4", size=64, nested=True)}


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
        self.sizes, self.format, self.n = sizes, format, sizes.n // UNIT
        self.k = max(sizes.k // UNIT, LARGEST_BLOCK if format in BLOCKS else 1)
        first = [self._weight() for _ in range(1 + sizes.gate)]
        self.nbytes = sum(one.nbytes for one in first)
        sets = sets or max(2, -(-int(LEAST_BYTES) // self.nbytes))
        # Few random matrices, copied: quantizing so many would take minutes.
        self.sets = [first, *([self._copy(one) for one in first] for _ in range(sets - 1))]

    def _weight(self):
        full = rand(self.n, self.k, spread=self.k**-0.5)
        if self.format in BLOCKS:
            return BLOCKS[self.format](full)
        return full if FORMATS[self.format] is None else quantize_weight(full, *FORMATS[self.format])

    def _copy(self, one):
        if isinstance(one, BlockWeight):
            return one._replace(data=one.data.clone())
        return one.clone() if isinstance(one, torch.Tensor) else one.each(torch.clone)

    @property
    def op(self) -> Callable:
        """The op that multiplies by weights of this format."""
        return fused_linear if self.format == "bf16" else quantized_linear

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
