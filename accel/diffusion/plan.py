"""The plan of a denoiser whose weights are quantised: before anything is understood or bound."""

from dataclasses import replace

import torch
from accel_kernels.projection import MOST_ROWS
from torch import nn
from torch.nn.modules.conv import _ConvNd

from accel.diffusion.family import RULES
from accel.diffusion.guard import Guard
from accel.diffusion.linears import linears, prompt_projections, refuses_rounding
from accel.options import Options
from accel.plan import Context, Plan, Row
from accel.quant.activations import is_static, kind_of
from accel.quant.module import QuantisedLinear
from accel.quant.quantisation import RULE, Quantisation
from accel.quant.row_rounding import RULE as ROUNDING
from accel.quant.row_rounding import Rounding
from accel.quant.scheme import Scheme


class DenoiserPlan(Plan):
    """Its quantised linears are the first patch, how they round rows the second. Where planning fails nothing stays."""

    def __init__(self, root: nn.Module, context: Context):
        options = context.options
        quantisation = None if options.weights is None else quantised(root, options)
        before = _bytes(root)
        rounding = None
        try:
            if quantisation is not None:
                quantisation.run()
            rounding = rounded(root, options)
            super().__init__(root, RULES, context)
        except BaseException:
            if rounding is not None:
                rounding.undo()
            if quantisation is not None:
                quantisation.swap.undo()
            raise
        if rounding is not None:
            self.patches.insert(0, rounding)
            self.rows += [Row(path, ROUNDING, status, reason) for path, status, reason in rounding.rows]
            self.rows.append(Row("", ROUNDING, "patched", _told(root, rounding)))
        if quantisation is not None:
            self.warnings = quantisation.warnings
            if quantisation.records:
                self.patches.insert(0, quantisation.swap)
            self.weights = [
                row | {"scheme": str(root.get_submodule(row["path"]).scheme)} for row in quantisation.records
            ]
            self.rows += [Row(path, RULE, status, reason) for path, status, reason in quantisation.rows]
            if quantisation.records:
                self.rows.append(Row("", RULE, "patched", _share(root, quantisation.records, before)))


def quantised(root: nn.Module, options: Options) -> Quantisation:
    """What is to be done, not done yet. Raises ValueError for a scheme of fewer bits than images bear, for one that
    names an output head, and for rows in float8 in a model of float16.
    """
    scheme = Scheme.parse(options.weights)
    if Scheme.of_head(options.weights) is not None:
        raise ValueError(
            f"weights={options.weights!r}: only causal language models have an output head; a {type(root).__name__} "
            "takes 'int8', 'int8-asym' or 'fp8'"
        )
    if scheme.number == "int4":
        raise ValueError(
            f"weights={options.weights!r}: for causal language models; a {type(root).__name__} takes "
            "'int8', 'int8-asym' or 'fp8'"
        )
    chosen, skipped = linears(root, scheme)
    half = any(linear.weight.dtype == torch.float16 for linear in chosen.values())
    if half and options.activations is not None and kind_of(options.activations) == "fp8":
        raise ValueError(
            f"activations={options.activations!r}: scaled products of float8 give bfloat16, and this "
            f"{type(root).__name__} is in float16; load it in bfloat16, or give weights='int8', activations='int8'"
        )
    return Quantisation(root, replace(options, activations=None), chosen, skipped, Guard(root))


def rounded(root: nn.Module, options: Options) -> Rounding | None:
    """The quantised linears that round rows, and do so now. Raises ValueError where there is none that could."""
    if options.activations is None:
        return None
    if is_static(options.activations):
        kind = kind_of(options.activations)
        raise ValueError(
            f"activations={options.activations!r}: for causal language models; a {type(root).__name__} takes {kind!r}"
        )
    held = [module for module in root.modules() if type(module) is QuantisedLinear]
    if not held and options.weights is None:
        kind = kind_of(options.activations)
        raise ValueError(
            f"activations={options.activations!r} needs weights of the same kind, and the {type(root).__name__} holds "
            f"none: give weights={kind!r} too"
        )
    rounding = Rounding(options)
    rounding.find(root, prompt_projections(root), lambda module: refuses_rounding(module, options.activations))
    return rounding


def _bytes(root: nn.Module, kinds: type = nn.Module) -> int:
    """Of the parameters of all modules of these kinds, counted once."""
    held = (p for module in root.modules() if isinstance(module, kinds) for p in module._parameters.values())
    return sum(p.nbytes for p in {id(p): p for p in held if p is not None}.values())


def _share(root: nn.Module, records: list[dict], before: int) -> str:
    """What became of the bytes of the model, for the report."""
    linear = sum(row["bytes_before"] for row in records)
    after = before - linear + sum(row["bytes_after"] for row in records)
    convolutions = f"convolutions, {_bytes(root, _ConvNd) / before:.0%}, and all else stay as they are"
    became = f"{before / 1e6:,.1f} MB become {after / 1e6:,.1f}"
    return f"{len(records)} linears, {linear / before:.0%} of the bytes; {convolutions}: {became}"


def _told(root: nn.Module, rounding: Rounding) -> str:
    """Which linears round, for the report."""
    left = sum(type(module) is QuantisedLinear for module in prompt_projections(root))
    prompt = f"; {left} that project the prompt, once a loop, do not" if left else ""
    return f"{len(rounding.pairs)} linears round rows, where there are more than {MOST_ROWS}{prompt}"
