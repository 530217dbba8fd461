"""How far two results of the same call are apart, and whether rounding explains it."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from accel.comparison import worst_rms
from accel.verification.agreement import Agreement
from accel.verification.image_metrics import gmsd, ssim


@dataclass(frozen=True)
class Quality:
    """Stock against optimized: figures, and a verdict.

    max_error: largest absolute error; relative_error: the same by the largest absolute stock value; relative_rms: root
    mean square of the error by that of stock, of the tensor where it is worst; psnr_db: images count as 0..1, for other
    outputs the peak is the largest stock value; ssim: mean structural similarity; gmsd: a perceptual loss, see
    `image_metrics.gmsd`; both None where there is no image; finite, stock_finite: no NaN or Inf in the optimized, in
    the stock output. Figures leave out elements that are not finite.
    error, allowed: what is judged, `measure` says which quantity that is; None where nothing is judged.
    stock_error: the same of stock, where it is measured against full precision.
    parts: the same for each model of a pipeline, on equal inputs; of a language model for the prompt and for decoding.
    agreement: of a language model, what the errors mean for its tokens.
    lossy: what the user asked for that changes results, in words; such a result is told, not judged.
    note: what could not be checked, and why.
    """

    max_error: float
    relative_error: float
    psnr_db: float
    finite: bool
    stock_finite: bool = True
    ssim: float | None = None
    gmsd: float | None = None
    relative_rms: float = 0.0
    error: float | None = None
    allowed: float | None = None
    measure: str = ""
    stock_error: float | None = None
    parts: Mapping[str, "Quality"] = field(default_factory=dict)
    agreement: Agreement | None = None
    lossy: str | None = None
    note: str = ""

    @property
    def failure(self) -> str | None:
        """Why the result does not pass, or None."""
        for name, quality in (("", self), *self.parts.items()):
            if quality.stock_finite and not quality.finite:
                return f"{name or 'the output'}: NaN or Inf where stock has none"
        for name, part in self.parts.items():
            if part.failure is not None:
                return f"{name}: {part.failure}"
        if self.lossy is not None:
            return None
        if self.error is not None and self.allowed is not None and not self.error <= self.allowed:  # nan fails too
            return f"{self.measure} {self.error:.1e}, more than the {self.allowed:.1e} that rounding explains"
        return None if self.agreement is None else self.agreement.failure

    @property
    def passed(self) -> bool:
        return self.failure is None

    @property
    def verdict(self) -> str:
        """One plain sentence."""
        if self.failure is not None:
            return f"FAILED: {self.failure}"
        if not self.stock_finite:
            ours = "accel's output is finite" if self.finite else "so does accel"
            return f"passed: stock itself gives NaN or Inf, {ours}"
        if self.lossy is not None:
            return f"lossy, as asked for ({self.lossy}): {self._apart()} from stock"
        if self.max_error == 0:
            return "passed: bit-equal to stock"
        judged = self.error is not None or any(part.error is not None for part in self.parts.values())
        return "passed: no further apart than rounding explains" if judged else "not judged"

    def _apart(self) -> str:
        psnr = "identical" if math.isinf(self.psnr_db) else f"PSNR {self.psnr_db:.1f} dB"
        images = "" if self.ssim is None else f", SSIM {self.ssim:.4f}"
        images += "" if self.gmsd is None else f", GMSD {self.gmsd:.4f}"
        finite = "" if self.finite else "; NaN or Inf in the optimized output"
        return (
            f"max error {self.max_error:.2e} ({self.relative_error:.1e} of the largest value), {psnr}{images}{finite}"
        )

    def to_dict(self) -> dict:
        """Plain values, for JSON; a PSNR of identical results is None."""
        names = [name for name in self.__dataclass_fields__ if name != "parts"]
        plain = {name: getattr(self, name) for name in names} | {"passed": self.passed, "verdict": self.verdict}
        plain["psnr_db"] = None if math.isinf(self.psnr_db) else self.psnr_db
        plain["agreement"] = None if self.agreement is None else self.agreement.to_dict()
        return plain | {"parts": {name: part.to_dict() for name, part in self.parts.items()}}

    def __str__(self) -> str:
        if not self.parts:
            judged = "" if self.verdict == "not judged" else f"; {self.verdict}"
            return self._apart() + judged
        from accel.progress import as_text

        return as_text(self).rstrip()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.table import Table
        from rich.text import Text

        rows = {**self.parts, "whole output": self}
        table = Table("", title="optimized against stock", title_justify="left")
        headings = ("max error", "PSNR", "SSIM", "GMSD", "finite", "error", "allowed")
        shown = [heading for heading in headings if heading not in ("SSIM", "GMSD") or self.agreement is None]
        for heading in shown:
            table.add_column(heading, justify="right")
        for name, row in rows.items():
            cells = dict(zip(headings, row._cells(), strict=True))
            table.add_row(name, *(cells[heading] for heading in shown), style=None if row.passed else "red")
        yield table
        for measure in dict.fromkeys(row.measure for row in rows.values() if row.measure):
            yield Text(f"error: {measure} ({', '.join(name for name, row in rows.items() if row.measure == measure)})")
        for name, row in rows.items():
            if row.note:
                yield Text(f"{name}: {row.note}")
        if self.agreement is not None:
            yield from map(Text, self.agreement.lines())
        yield Text(self.verdict, style="green" if self.passed else "bold red")

    def _cells(self) -> tuple[str, ...]:
        psnr = "equal" if math.isinf(self.psnr_db) else f"{self.psnr_db:.1f} dB"
        finite = {(True, True): "yes", (True, False): "NO", (False, True): "stock is not"}
        return (
            f"{self.max_error:.1e}",
            psnr,
            "" if self.ssim is None else f"{self.ssim:.4f}",
            "" if self.gmsd is None else f"{self.gmsd:.4f}",
            finite.get((self.stock_finite, self.finite), "neither"),
            "" if self.error is None else f"{self.error:.1e}",
            "" if self.allowed is None else f"{self.allowed:.1e}",
        )


def compare(stock: Any, ours: Any) -> Quality:
    """Quality of `ours` against `stock`, not judged: outputs of a pipeline or a model, nested tensors and PIL images.

    Raises ValueError where there is nothing to compare, or shapes differ.
    """
    pairs = list(zip(tensors(stock), tensors(ours), strict=True))
    if not pairs:
        raise ValueError(f"nothing to compare in an output of type {type(stock).__name__}")
    for wanted, got in pairs:
        if wanted.shape != got.shape:
            raise ValueError(f"stock gives {tuple(wanted.shape)}, optimized {tuple(got.shape)}")
    finite = all(bool(got.isfinite().all()) for _, got in pairs)
    stock_finite = all(bool(wanted.isfinite().all()) for wanted, _ in pairs)
    # Without the elements that are NaN or Inf in either.
    meant = [(wanted, got, wanted.isfinite() & got.isfinite()) for wanted, got in pairs]
    kept = [(wanted, got) if bool(both.all()) else (wanted[both], got[both]) for wanted, got, both in meant]
    error = max((float((wanted - got).abs().max()) for wanted, got in kept if wanted.numel()), default=0.0)
    peak = max((float(wanted.abs().max()) for wanted, _ in kept if wanted.numel()), default=0.0)
    squares = sum(float(((wanted - got) ** 2).sum()) for wanted, got in kept)
    mean = squares / max(1, sum(wanted.numel() for wanted, _ in kept))
    images = list(zip(images_in(stock), images_in(ours), strict=True)) if finite and stock_finite else []
    images = [(wanted, got) for wanted, got in images if wanted.min() >= 0 and wanted.max() <= 1]  # not latents
    height = 1.0 if images else max(peak, 1e-12)
    return Quality(
        max_error=error,
        relative_error=error / max(peak, 1e-12),
        psnr_db=math.inf if mean == 0 else 10 * math.log10(height**2 / mean),
        finite=finite,
        stock_finite=stock_finite,
        ssim=_mean(ssim, images),
        gmsd=_mean(gmsd, images),
        relative_rms=worst_rms((got for _, got in kept), (wanted for wanted, _ in kept)),
    )


def _mean(measure: Callable[[torch.Tensor, torch.Tensor], float], images: list) -> float | None:
    found = [measure(wanted, got) for wanted, got in images]
    return sum(found) / len(found) if found else None


def tensors(output: Any) -> list[torch.Tensor]:
    """Every tensor, array or image in an output, as float64 on the CPU; images in 0..1."""
    found = []
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf.detach().double().cpu())
        elif hasattr(leaf, "convert"):  # a PIL image
            found.append(_pixels(leaf))
        elif type(leaf).__module__ == "numpy" and hasattr(leaf, "dtype"):
            found.append(torch.as_tensor(leaf).double())
    return found


def images_in(output: Any) -> list[torch.Tensor]:
    """The images of a pipeline's output, or its videos' frames, (N, C, H, W); also latents of three channels."""
    found, named = [], next((name for name in ("images", "frames") if hasattr(output, name)), None)
    for leaf in pytree.tree_leaves(output if named is None else getattr(output, named)):
        if hasattr(leaf, "convert"):
            found.append(_pixels(leaf).permute(2, 0, 1)[None])
        elif named is not None and getattr(leaf, "ndim", 0) in (4, 5):
            batch = torch.as_tensor(leaf).detach().double().cpu()
            batch = batch.flatten(0, -4)  # videos, frame by frame
            # Arrays have their channels last, tensors first.
            found.append(batch if isinstance(leaf, torch.Tensor) else batch.permute(0, 3, 1, 2))
    return [batch for batch in found if batch.shape[1] in (1, 3)]


def _pixels(image: Any) -> torch.Tensor:
    """A PIL image as (H, W, 3) in 0..1."""
    import numpy

    return torch.from_numpy(numpy.array(image.convert("RGB"))).double() / 255
