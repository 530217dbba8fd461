"""The stages before the rules of a denoiser: quantize weights, round activations. No stage changes the model."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from accel_kernels import Quantized
from accel_kernels.gemm.fused_linear import MOST_ROWS
from torch import nn
from torch.nn.modules.conv import _ConvNd

from accel.diffusion.family import RULES
from accel.diffusion.linears import denoiser_linears, prompt_projections, refuses_rounding
from accel.diffusion.merge_guard import MergeGuard
from accel.options import Options
from accel.patching.rule import Context
from accel.planning.plan import Plan, Row, StageReport, StageResult, rows_of
from accel.quantization.activation_quantization import RULE as ROUNDING
from accel.quantization.activation_quantization import Rounding
from accel.quantization.activations import is_static, weight_dtype_of
from accel.quantization.model import RULE, Quantization
from accel.quantization.module import QuantizedLinear
from accel.quantization.scheme import Scheme


def denoiser_plan(model: nn.Module, context: Context) -> Plan:
    """The plan of a denoiser whose weights are quantized, or already are."""
    return Plan(model, RULES, context, (quantize_denoiser, round_activations))


def quantize_denoiser(model: nn.Module, context: Context) -> StageResult:
    """The weights the options name, before anything is understood or bound. Raises ValueError as `quantized` does."""
    weights = context.options.weights
    if weights is None:
        return StageResult()
    (found, kept), before = denoiser_quantization(model, weights, context.options), _bytes(model)

    def report() -> StageReport:
        rows = rows_of(RULE, [*found.rows, *((path, "skipped", reason) for path, reason in kept.items())])
        if found.records:
            rows.append(Row("", RULE, "patched", _share(model, found.records, kept, before)))
        records = [row | {"scheme": str(model.get_submodule(row["path"]).scheme)} for row in found.records]
        return StageReport(rows, records, found.warnings)

    return StageResult((found.swap,), report)


def round_activations(model: nn.Module, context: Context) -> StageResult:
    """The quantized linears that it holds by now round their inputs. Raises ValueError as `find_rounding` does."""
    found = find_rounding(model, context.options)
    if found is None:
        return StageResult()
    return StageResult(
        (found,), lambda: StageReport(rows_of(ROUNDING, [*found.rows, ("", "patched", _told(model, found))]))
    )


def denoiser_quantization(root: nn.Module, weights: str, options: Options) -> tuple[Quantization, dict[str, str]]:
    """What is to be done, not done yet; and which linears are kept as they are, by path, and why: by design, so with
    `strict` too. Raises ValueError as `denoiser_scheme`, and for rows in float8 in a model of float16.
    """
    scheme = denoiser_scheme(root, weights)
    chosen, skipped, kept = denoiser_linears(root, scheme)
    half = any(linear.weight.dtype == torch.float16 for linear in chosen.values())
    if half and options.activations is not None and weight_dtype_of(options.activations) == "fp8":
        raise ValueError(
            f"activations={options.activations!r}: scaled products of float8 give bfloat16, and this "
            f"{type(root).__name__} is in float16; load it in bfloat16, or give weights='int8', activations='int8'"
        )
    options = replace(options, activations=None)
    return DenoiserQuantization(root, weights, options, chosen, skipped, MergeGuard(root)), kept


def denoiser_scheme(root: nn.Module, weights: str) -> Scheme:
    """Raises ValueError for one of fewer bits than images bear, and for one that names an output head."""
    scheme, takes = Scheme.parse(weights), f"a {type(root).__name__} takes 'int8', 'int8-asym' or 'fp8'"
    if Scheme.of_head(weights) is not None:
        raise ValueError(f"weights={weights!r}: only causal language models have an output head; {takes}")
    if scheme.weight_dtype == "int4":
        raise ValueError(f"weights={weights!r}: for causal language models; {takes}")
    return scheme


class DenoiserQuantization(Quantization):
    """With scales of float8 in float32, as torch's product takes them: else each product would have its cast."""

    def _rounded(self, *args: Any) -> tuple[Quantized, str]:
        quantized, note = super()._rounded(*args)
        if quantized.format.name == "fp8":
            quantized = quantized._replace(scales=quantized.scales.float())
        return quantized, note


def find_rounding(root: nn.Module, options: Options) -> Rounding | None:
    """The quantized linears that are to round rows. Raises ValueError where there is none that could."""
    activations = options.activations
    if activations is None:
        return None
    if is_static(activations):
        kind = weight_dtype_of(activations)
        raise ValueError(
            f"activations={activations!r}: for causal language models; a {type(root).__name__} takes {kind!r}"
        )
    held = [module for module in root.modules() if type(module) is QuantizedLinear]
    if not held and options.weights is None:
        kind = weight_dtype_of(activations)
        raise ValueError(
            f"activations={activations!r} needs weights of the same kind, and the {type(root).__name__} holds "
            f"none: give weights={kind!r} too"
        )
    rounding = Rounding(options)
    rounding.find(root, prompt_projections(root), lambda module: refuses_rounding(module, activations))
    return rounding


def _bytes(root: nn.Module, kinds: type = nn.Module) -> int:
    """Of the parameters of all modules of these kinds, counted once."""
    held = (p for module in root.modules() if isinstance(module, kinds) for p in module._parameters.values())
    return sum(p.nbytes for p in {id(p): p for p in held if p is not None}.values())


def _share(root: Any, records: list[dict], kept: Collection[str], before: int) -> str:
    """What became of the bytes of the model, for the report. kept: paths of linears."""
    linear = sum(row["bytes_before"] for row in records)
    after = before - linear + sum(row["bytes_after"] for row in records)
    sensitive = sum(root.get_submodule(path).weight.nbytes for path in kept)
    others = [f"convolutions, {_bytes(root, _ConvNd) / before:.0%},"]
    others += [f"{len(kept)} linears that modulate or lie in no block, {sensitive / before:.0%},"] if kept else []
    became = f"{before / 1e6:,.1f} MB become {after / 1e6:,.1f}"
    told = f"{' '.join(others)} and all else stay as they are"
    return f"{len(records)} linears, {linear / before:.0%} of the bytes; {told}: {became}"


def _told(root: nn.Module, rounding: Rounding) -> str:
    """Which linears round, for the report."""
    left = sum(type(module) is QuantizedLinear for module in prompt_projections(root))
    prompt = f"; {left} that project the prompt, once a loop, do not" if left else ""
    return f"{len(rounding.pairs)} linears round rows, where there are more than {MOST_ROWS}{prompt}"
