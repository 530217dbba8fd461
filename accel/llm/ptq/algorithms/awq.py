"""AWQ: channels that get large inputs are made large in the weights, where rounding then hurts them less.

Lin, Tang, Tang, Yang, Chen, Wang, Xiao, Dang, Gan, Han, "AWQ: Activation-aware Weight Quantization for LLM Compression
and Acceleration", 2024.
"""

from collections.abc import Sequence

import torch
from accel_kernels.gemm.quantized_weight import Quantized
from torch import Tensor, nn

from accel.llm.ptq.algorithms.gptq import Hessian
from accel.llm.ptq.calibration.folding import FoldGroup, middle
from accel.llm.ptq.calibration.layer_work import LayerWork
from accel.llm.ptq.calibration.linears import put, trial, weight_matrix
from accel.quantization.rounding import SCALES, nearest, round_to_nearest, wide_grid
from accel.quantization.scheme import Scheme

RATIO_STEPS, LEAST = 10, 0.5  # ratios of the largest weight tried, from 1 down to this one
AT_ONCE = 2**22  # weights in work


def clipped(weight: Tensor, hessian: Tensor, scheme: Scheme) -> Quantized:
    """weight: (N, K), each group of a row cut off at the ratio of its largest values that makes d^T H d least, d being
    what its numbers are off. hessian: see `Hessian`. Otherwise as `round_to_nearest`.
    """
    dtype = weight.dtype if weight.dtype in SCALES else torch.float32
    parts = []
    for rows in weight.detach().split(max(1, AT_ONCE // weight.shape[1])):
        groups = rows.float().unflatten(1, (-1, scheme.group or weight.shape[1]))
        best = _cut(groups, 1)
        least = _error(groups, best, hessian, scheme, dtype)
        for step in range(1, RATIO_STEPS + 1):
            narrow = _cut(groups, 1 - step * (1 - LEAST) / RATIO_STEPS)
            error = _error(groups, narrow, hessian, scheme, dtype)
            better = error < least
            least, best = torch.where(better, error, least), torch.where(better[..., None], narrow, best)
        parts.append(best.flatten(1).to(weight.dtype))
    return round_to_nearest(torch.cat(parts), scheme)


def _cut(groups: Tensor, ratio: float) -> Tensor:
    return groups.clamp(groups.amin(-1, keepdim=True) * ratio, groups.amax(-1, keepdim=True) * ratio)


def _error(groups: Tensor, narrow: Tensor, hessian: Tensor, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """(rows, groups)."""
    scales, zeros = wide_grid(narrow, scheme, dtype)
    zeros = None if zeros is None else zeros[..., None]
    numbers = nearest(narrow, scales[..., None], zeros, scheme).float()
    values = (numbers if zeros is None else numbers - zeros.float()) * scales.float()[..., None]
    off = (groups - values).transpose(0, 1)
    return ((off @ hessian) * off).sum(-1).t()


EXPONENT_STEPS = 20  # of the exponent, from 0, which is no scale at all, on
SMALLEST = 1e-4  # a channel's size, relative to the largest one's


class MeanSize:
    """mean |x| of every channel, (K,) in float32."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.tokens = 0

    def __call__(self, rows: Tensor) -> None:
        """rows: (tokens, K)."""
        if len(rows):
            total = rows.float().abs().sum(0)
            self.total = total if self.total is None else self.total + total
            self.tokens += len(rows)

    @property
    def mean(self) -> Tensor | None:
        return None if self.total is None else self.total / self.tokens


def quantize_layer(work: LayerWork, model: nn.Module, groups: Sequence[FoldGroup]) -> None:
    """Group by group finds mean|x|^alpha, alpha by the error of the layer's output, and folds it into what stands
    before; then rounds, with the groups of columns clipped where that makes the error smaller.
    """
    work.notes += [group.note for group in groups if group.before is None]
    sizes = work.inputs([group for group in groups if group.before is not None], MeanSize)
    for group, size in sizes.items():
        if group.before is not None and size.mean is not None and bool(size.mean.any()):
            scales = _searched(work, group, group.before.tied(size.mean))
            if scales is not None:
                work.changed |= group.fold(model, scales)
    _round(work)


def _searched(work: LayerWork, group: FoldGroup, sizes: Tensor) -> Tensor | None:
    """The best scales for a group of linears, None for none at all."""
    modules = {path: work.linears[path] for path in group.paths if path in work.linears}
    least, best = float("inf"), None
    for step in range(EXPONENT_STEPS):
        scales = _scales(sizes, step / EXPONENT_STEPS) if step else None
        with trial(module.weight for module in modules.values()):
            for path, module in modules.items():
                if scales is None:
                    put(module, work.nearest(path).dequantized(torch.float32))
                else:
                    scaled = round_to_nearest(
                        (weight_matrix(module).float() * scales).to(module.weight.dtype), work.scheme
                    )
                    put(module, scaled.dequantized(torch.float32) / scales)
            error = work.error()
        if error < least:
            least, best = error, scales
    return best


def _round(work: LayerWork) -> None:
    for stage in work.stages():
        hessian = Hessian(work.scheme.group)
        if work.scheme.group is not None:
            work.observe({stage[0]: hessian})
        found = {path: work.nearest(path) for path in stage}
        if hessian.mean is not None:
            narrow = {path: clipped(weight_matrix(work.linears[path]), hessian.mean, work.scheme) for path in stage}
            errors = []
            for candidate in (found, narrow):
                with trial(work.linears[path].weight for path in stage):
                    for path, quantized in candidate.items():
                        put(work.linears[path], quantized.dequantized(torch.float32))
                    errors.append(work.error())
            found = narrow if errors[1] < errors[0] else found
        for path, quantized in found.items():
            work.keep(path, quantized)
    work.round_rest()


def _scales(sizes: Tensor, exponent: float) -> Tensor:
    scales = sizes.clamp_min(SMALLEST * float(sizes.max())).pow(exponent)
    return scales / middle(scales)
