"""The first two parts: ten digits drawn by a small pipeline with a UNet, and by one with a diffusion transformer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.progress import Progress
from rich.table import Table

from accel import saved
from accel.demo.comparison import Comparison, run_both
from accel.demo.contact_sheet import contact_sheet

MODEL = Path("examples", "models", "tiny-sd-digits")
TRANSFORMER = Path("examples", "models", "tiny-dit-digits")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PROMPT = "a handwritten {}"
AMPLIFY = 10  # the difference is drawn this many times as strong


@dataclass(frozen=True)
class Drawings(Comparison):
    """Images, (height, width, 3) floats from 0 to 1. drawn_by: "UNet" or "transformer"."""

    drawn_by: str
    steps: int

    @property
    def max_error(self) -> float:
        return max(float(np.abs(a - b).max()) for a, b in zip(self.stock, self.optimized, strict=True))

    @property
    def psnr_db(self) -> float:
        """Of all images together; infinite where they are equal."""
        error = np.mean([(a.astype(np.float64) - b) ** 2 for a, b in zip(self.stock, self.optimized, strict=True)])
        return float("inf") if error == 0 else float(-10 * np.log10(error))

    def picture(self) -> Image.Image:
        """Three labeled rows of ten: stock, accel, and what differs; what drew them stands above."""
        difference = [np.abs(a - b) * AMPLIFY for a, b in zip(self.stock, self.optimized, strict=True)]
        rows = {"stock": self.stock, "accel": self.optimized, f"difference x{AMPLIFY}": difference}
        return contact_sheet(rows, DIGITS[: len(self.stock)], self.drawn_by)

    def shown(self) -> Table:
        peaks: tuple[str, ...] = ("-", "-", "only on a GPU")
        if self.peak_mb is not None:
            peaks = (*(f"{mb:.1f} MiB" for mb in self.peak_mb), f"{self.peak_mb[1] / self.peak_mb[0]:.2f}x")
        return self.table(
            f"{self.drawn_by}: {len(self.stock)} digits of {self.steps} steps",
            ("time per image", *(f"{took * 1e3:.1f} ms" for took in self.medians)),
            ("steps per second", *(f"{self.steps / took:.1f} it/s" for took in self.medians)),
            ("peak memory", *peaks),
            ("max abs error", "", f"{self.max_error:.2e}", f"{self.max_error * 255:.2f} / 255"),
            ("PSNR", "", "equal" if self.psnr_db == float("inf") else f"{self.psnr_db:.1f} dB"),
        )


def run(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    steps: int,
    seed: int,
    progress: Progress,
    digits: tuple[str, ...] = DIGITS,
) -> Drawings:
    """Draws every digit with both pipelines in turn."""

    def load() -> Any:
        pipe = saved.load_saved(folder, dtype, device)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def draw(pipe: Any, number: int) -> np.ndarray:
        generator, prompt = torch.Generator("cpu").manual_seed(seed + number), PROMPT.format(digits[number])
        return pipe(prompt, num_inference_steps=steps, generator=generator, output_type="np").images[0]

    def exact(pipe: Any) -> torch.Tensor:
        return torch.from_numpy(draw(pipe, 0))

    drawn_by = "transformer" if (folder / "transformer").is_dir() else "UNet"
    found = run_both(load, draw, exact, len(digits), device, progress, f"digits by a {drawn_by}")
    return Drawings(**found, drawn_by=drawn_by, steps=steps)
