"""SmoothQuant: channels of large inputs are divided, and the weights multiplied, before both are rounded to int8.

Xiao, Lin, Seznec, Wu, Demouth, Han, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models", 2023.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from accel.llm.ptq.calibration.folding import FoldGroup, middle
from accel.llm.ptq.calibration.layer_work import LayerWork
from accel.llm.ptq.calibration.linears import put, trial, weight_matrix

EXPONENTS = (None, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # None: not smoothed


class LargestSize:
    """max |x| of every channel, (K,) in float32."""

    def __init__(self) -> None:
        self.largest: Tensor | None = None

    def __call__(self, rows: Tensor) -> None:
        """rows: (tokens, K)."""
        if len(rows):
            largest = rows.float().abs().amax(0)
            self.largest = largest if self.largest is None else torch.maximum(largest, self.largest)


def quantize_layer(work: LayerWork, model: nn.Module, groups: Sequence[FoldGroup]) -> None:
    """Folds max|x|^a / max|w|^(1 - a) into the norms, then rounds to nearest.

    The layer has one a, with which the error of its output is least where inputs and weights of its linears are int8.
    """
    work.notes += [group.note for group in groups if group.normed and group.before is None]
    sizes = work.inputs([group for group in groups if group.normed and group.before is not None], LargestSize)
    found = {group: size.largest for group, size in sizes.items() if size.largest is not None}
    work.fake_quant = True
    least, best = float("inf"), None
    for exponent in EXPONENTS if found else ():
        with trial(work.layer.parameters()):
            _fold(work, model, found, exponent)
            for path, module in work.linears.items():
                put(module, work.nearest(path).dequantized(torch.float32))
            error = work.error()
        if error < least:
            least, best = error, exponent
    work.changed |= _fold(work, model, found, best)
    work.round()


def _fold(
    work: LayerWork, model: nn.Module, sizes: dict[FoldGroup, Tensor], exponent: float | None
) -> dict[str, nn.Parameter]:
    if exponent is None:
        return {}
    changed: dict[str, nn.Parameter] = {}
    for group, inputs in sizes.items():
        columns = [weight_matrix(model.get_submodule(path)).float().abs().amax(0) for path in group.paths]
        largest = torch.stack(columns).amax(0)
        used = (inputs > 0) & (largest > 0)
        scales = inputs.pow(exponent) / largest.pow(1 - exponent)
        if bool(used.any()):
            changed |= group.fold(model, torch.where(used, scales / middle(scales[used]), 1.0))
    return changed
