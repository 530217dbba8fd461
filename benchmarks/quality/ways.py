"""The ways to store a model that are measured: weights rounded by a method, inputs and caches as if rounded."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from accel_kernels.attention.paged.kv_quantization import restored, rounded
from accel_kernels.gemm.quantize_rows import SHARE
from torch import nn
from transformers import DynamicCache

from accel.bench.timing import seconds as taken
from accel.llm.ptq.calibrate import quantize_layers
from accel.llm.ptq.calibration.layer_work import rounded_by_token, rounding_inputs
from accel.llm.ptq.calibration.linears import linears
from accel.quantization.rounding import sqnr_db
from accel.quantization.scheme import Scheme
from benchmarks.quality.text import perplexity

CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
OUTLIER = 6.0  # LLM.int8 (Dettmers et al., 2022): columns with a larger input stay in 16 bits
FACTOR = 80.0  # by which planted channels are larger
FOUR_BITS = ("int4", "int4-g64", "int4-g32")


@dataclass(frozen=True)
class Way:
    """inputs: of the linears, emulated: "int8" by token, or "int8 but outliers". kv_cache: rounded as it is filled."""

    weights: str | None = None
    method: str = "rtn"
    inputs: str | None = None
    kv_cache: str | None = None

    @property
    def name(self) -> str:
        kv = f"kv {self.kv_cache}" if self.kv_cache else None
        inputs = f"inputs {self.inputs}" if self.inputs else None
        parts = (self.weights, self.method if self.weights else None, inputs, kv)
        return ", ".join(filter(None, parts)) or "as it is"


WEIGHTS_ONLY = [Way("int8"), Way("fp8"), *(Way(name, how) for name in FOUR_BITS for how in ("rtn", "gptq", "awq"))]
WEIGHTS_ONLY += [Way("int8-asym"), Way("int4-g64-asym"), Way("int4-g64-asym", "gptq"), Way("int4-g32-asym")]
INPUTS_TOO = [Way("int8", inputs="int8"), Way("int8", "smoothquant", "int8"), Way("int8", inputs="int8 but outliers")]
WAYS = [*WEIGHTS_ONLY, *INPUTS_TOO, *(Way(kv_cache=kind) for kind in CODES), Way("int4", "gptq", kv_cache="int8")]
PLANTED = [way for way in WAYS if way.weights in ("int8", "fp8", "int4") and way.kv_cache is None]


def planted(model: nn.Module, seed: int = 0) -> nn.Module:
    """A model that computes the same, with one channel in 128, three at least, larger by FACTOR behind every norm."""
    model, size = copy.deepcopy(model), model.config.hidden_size
    chosen = torch.randperm(size, generator=torch.Generator().manual_seed(seed))[: max(3, size // 128)]
    scales = torch.ones(size)
    scales[chosen] = FACTOR
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for norm, readers in (
                (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                norm.weight *= scales.to(norm.weight)
                for linear in readers:
                    linear.weight /= scales.to(linear.weight)
    return model


def without_outliers(x: torch.Tensor) -> torch.Tensor:
    """As `rounded_by_token`, but columns with any value above OUTLIER are left as they are, or all where many have."""
    large = (x.abs() > OUTLIER).flatten(0, -2).any(0)
    large = large | (large.sum() * SHARE > large.numel())
    return torch.where(large, x, rounded_by_token(x.masked_fill(large, 0)))


@contextmanager
def rounding_cache(kind: str | None) -> Iterator[None]:
    """Inside, a model that makes its own cache has keys and values rounded, those of its own tokens too."""
    update = DynamicCache.update

    def rounds(self, keys, values, *args, **kwargs):
        return update(self, *(restored(*rounded(t, CODES[kind]), t.dtype) for t in (keys, values)), *args, **kwargs)

    if kind is not None:
        DynamicCache.update = rounds
    try:
        yield
    finally:
        DynamicCache.update = update


@contextmanager
def fake_quant(modules: list[nn.Module], inputs: str | None) -> Iterator[None]:
    with ExitStack() as undo:
        if inputs == "int8":
            undo.enter_context(rounding_inputs(modules))
        elif inputs is not None:
            for module in modules:
                hook = module.register_forward_pre_hook(lambda _, args: tuple(map(without_outliers, args)))
                undo.callback(hook.remove)
        yield


def quantized(stock: nn.Module, way: Way, batches: list[dict]) -> tuple[nn.Module, dict]:
    """A copy with its weights rounded, and what there is to tell. layers: decibels of what each adds to its hidden
    states, on the calibration; linears: of each weight, where no scale was folded into it.
    """
    model, scheme = copy.deepcopy(stock), Scheme.parse(way.weights)
    chosen, skipped = linears(model, scheme)
    if not chosen:
        raise ValueError(next(iter(skipped.values())))
    device = next(model.parameters()).device
    results: list = []
    seconds = taken(lambda: results.extend(quantize_layers(model, scheme, way.method, batches)), device)
    exact = {path: stock.get_submodule(path).weight for path in chosen}
    of_weights = {
        path: round(sqnr_db(exact[path], held), 2)
        for result in results
        for path, held in result.weights.items()
        if f"{path}.weight" not in result.changed and not (result.changed and way.method in ("awq", "smoothquant"))
    }
    held = [one for result in results for one in result.weights.values()]
    return model, {
        "seconds": round(seconds, 2),
        "linears": len(held),
        "left_alone": len(skipped),
        "bytes_of_16_bits": round(sum(one.nbytes for one in held) / sum(2 * w.numel() for w in exact.values()), 4),
        "layers_db": {result.path: round(result.sqnr_db, 2) for result in results},
        "linears_db": of_weights,
        "notes": sorted({note for result in results for note in result.notes}),
    }


class Ways:
    """Measures ways to store one model; those that round the same weights alike share what was rounded."""

    def __init__(self, stock: nn.Module, batches: list[dict], rows: torch.Tensor):
        self.stock, self.batches, self.rows = stock, batches, rows
        self.made: dict[tuple, tuple[nn.Module, dict]] = {}

    def __call__(self, way: Way) -> dict:
        key, model, told, modules = (way.weights, way.method), self.stock, {}, []
        if way.weights is not None:
            if key not in self.made:
                self.made[key] = quantized(self.stock, way, self.batches)
            model, told = self.made[key]
            modules = list(linears(model, Scheme.parse(way.weights))[0].values())
        with fake_quant(modules, way.inputs), rounding_cache(way.kv_cache):
            return {"perplexity": perplexity(model, self.rows)} | told
