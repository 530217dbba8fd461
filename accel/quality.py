"""How far two results of the same call are apart."""

import math
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Quality:
    """Largest absolute error, the same relative to the largest stock value, PSNR in dB, and whether all is finite.

    Images count as 0..1; for other outputs the PSNR's peak is the largest absolute stock value.
    """

    max_error: float
    relative_error: float
    psnr_db: float
    finite: bool

    def __str__(self) -> str:
        psnr = "identical" if math.isinf(self.psnr_db) else f"PSNR {self.psnr_db:.1f} dB"
        finite = "" if self.finite else "; NaN or Inf in the optimised output"
        return f"max error {self.max_error:.2e} ({self.relative_error:.1e} of the largest value), {psnr}{finite}"


def compare(stock, ours) -> Quality:
    """Quality of `ours` against `stock`: outputs of a pipeline or a model, any nesting of tensors and PIL images."""
    pairs = list(zip(_tensors(stock), _tensors(ours), strict=True))
    if not pairs:
        raise ValueError(f"nothing to compare in an output of type {type(stock).__name__}")
    for wanted, got in pairs:
        if wanted.shape != got.shape:
            raise ValueError(f"stock gives {tuple(wanted.shape)}, optimised {tuple(got.shape)}")
    error = max(float((wanted - got).abs().max()) for wanted, got in pairs)
    peak = max(float(wanted.abs().max()) for wanted, _ in pairs)
    squares = sum(float(((wanted - got) ** 2).sum()) for wanted, got in pairs)
    mean = squares / sum(wanted.numel() for wanted, _ in pairs)
    psnr = math.inf if mean == 0 else 10 * math.log10(max(peak, 1e-12) ** 2 / mean)
    finite = all(bool(torch.isfinite(got).all()) for _, got in pairs)
    return Quality(error, error / max(peak, 1e-12), psnr, finite)


def _tensors(output) -> list[torch.Tensor]:
    """Every tensor, array or image in an output, as float64 on the CPU; images in 0..1."""
    found = []
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf.detach().double().cpu())
        elif hasattr(leaf, "convert"):  # a PIL image
            import numpy

            found.append(torch.from_numpy(numpy.array(leaf.convert("RGB"))).double() / 255)
        elif type(leaf).__module__ == "numpy" and hasattr(leaf, "dtype"):
            found.append(torch.as_tensor(leaf).double())
    return found
