"""The first two parts: ten digits drawn by a small pipeline with a UNet, and by one with a diffusion transformer.

Two copies of a pipeline are loaded as any user would, and one is given to `accel.optimize`. The two take turns, so that
nothing but the one line differs between them.
"""

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

import accel
from accel import saved
from accel.bench.timing import seconds
from accel.demo.contact_sheet import contact_sheet
from accel.demo.shipped import device_line, find_folder, speed_ratio
from accel.report import Report

MODEL = Path("examples", "models", "tiny-sd-digits")
TRANSFORMER = Path("examples", "models", "tiny-dit-digits")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PROMPT = "a handwritten {}"
AMPLIFY = 10  # the difference is drawn this many times as strong


def find_model(folder: Path | None) -> Path:
    """The given folder; without one, the UNet's pipeline of a checkout. Raises FileNotFoundError saying what to do."""
    return find_folder(folder, MODEL, "pipeline", "model_index.json")


def find_transformer(folder: Path | None) -> Path:
    """The same of the transformer's pipeline."""
    return find_folder(folder, TRANSFORMER, "pipeline", "model_index.json")


@dataclass(frozen=True)
class Comparison:
    """What was drawn and measured; images are (height, width, 3) floats from 0 to 1.

    drawn_by: "UNet" or "transformer".
    """

    drawn_by: str
    stock: list[np.ndarray]
    optimized: list[np.ndarray]
    stock_s: list[float]
    optimized_s: list[float]
    ready_s: float
    peak_mb: tuple[float, float] | None
    restored_equal: bool
    steps: int
    machine: str
    report: Report

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

    def table(self) -> Table:
        stock_s, optimized_s = statistics.median(self.stock_s), statistics.median(self.optimized_s)
        shown = Table(
            title=f"{self.drawn_by}: {len(self.stock)} digits of {self.steps} steps, on {self.machine}; medians",
            title_justify="left",
        )
        shown.add_column("")
        for name in ("stock", "accel", "ratio"):
            shown.add_column(name, justify="right")
        ratio = speed_ratio(self.stock_s, self.optimized_s, self.report)
        shown.add_row("time per image", f"{stock_s * 1e3:.1f} ms", f"{optimized_s * 1e3:.1f} ms", ratio)
        shown.add_row(
            "steps per second", f"{self.steps / stock_s:.1f} it/s", f"{self.steps / optimized_s:.1f} it/s", ""
        )
        if self.peak_mb:
            stock_mb, optimized_mb = self.peak_mb
            shown.add_row(
                "peak memory", f"{stock_mb:.1f} MiB", f"{optimized_mb:.1f} MiB", f"{optimized_mb / stock_mb:.2f}x"
            )
        else:
            shown.add_row("peak memory", "-", "-", "only on a GPU")
        shown.add_row("time to ready", "", f"{self.ready_s:.2f} s", "")
        shown.add_row("max abs error", "", f"{self.max_error:.2e}", f"{self.max_error * 255:.2f} / 255")
        shown.add_row("PSNR", "", "equal" if self.psnr_db == float("inf") else f"{self.psnr_db:.1f} dB", "")
        shown.add_row("undone by accel.restore", "", "bit-equal" if self.restored_equal else "[red]not equal[/red]", "")
        return shown

    def show(self, console: Console) -> None:
        console.print(self.table())
        console.print(Text(self.report.summary()))


def _load(folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    pipe = saved.load_saved(folder, dtype, device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _draw(pipe: Any, word: str, seed: int, steps: int) -> np.ndarray:
    generator = torch.Generator("cpu").manual_seed(seed)
    prompt = PROMPT.format(word)
    return pipe(prompt, num_inference_steps=steps, generator=generator, output_type="np").images[0]


def _timed(draw: Callable[[], np.ndarray], device: torch.device, times: list[float], images: list[np.ndarray]) -> None:
    times.append(seconds(lambda: images.append(draw()), device))


class _Peak:
    """MiB that work needs at its peak above what others held before it began; None away from a GPU."""

    def __init__(self, device: torch.device):
        self.device = device if device.type == "cuda" else None
        if self.device:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)

    def mb(self) -> float | None:
        return (torch.cuda.max_memory_allocated(self.device) - self.before) / 2**20 if self.device else None


def _warm_libraries(device: torch.device, dtype: torch.dtype) -> None:
    """One matmul: the workspace it makes stays for the whole process and is nobody's peak memory."""
    torch.ones(64, 64, device=device, dtype=dtype) @ torch.ones(64, 64, device=device, dtype=dtype)


def run(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    steps: int,
    seed: int,
    progress: Progress,
    digits: tuple[str, ...] = DIGITS,
) -> Comparison:
    """Draws every digit with both pipelines in turn. The first picture of each is a warm-up, drawn before."""
    task = progress.add_task("loading", total=2 * len(digits) + 4)
    warm = digits[0]

    _warm_libraries(device, dtype)
    peak = _Peak(device)
    stock = _load(folder, device, dtype)
    progress.update(task, description="warming up stock", advance=1)
    _draw(stock, warm, seed, steps)
    stock_mb = peak.mb()

    peak = _Peak(device)
    optimized = _load(folder, device, dtype)
    progress.update(task, description="optimizing", advance=1)
    first_s = seconds(lambda: (accel.optimize(optimized), _draw(optimized, warm, seed, steps)), device)
    optimized_mb = peak.mb()

    stock_s: list[float] = []
    optimized_s: list[float] = []
    stock_images: list[np.ndarray] = []
    optimized_images: list[np.ndarray] = []
    for number, word in enumerate(digits):
        progress.update(task, description=f"drawing {word}")
        turns = [(stock, stock_s, stock_images), (optimized, optimized_s, optimized_images)]
        for pipe, times, images in turns if number % 2 else reversed(turns):
            _timed(partial(_draw, pipe, word, seed + number, steps), device, times, images)
            progress.advance(task)

    report = accel.report(optimized)
    progress.update(task, description="undoing", advance=1)
    again = _draw(accel.restore(optimized), warm, seed, steps)
    progress.advance(task)
    return Comparison(
        drawn_by="transformer" if getattr(stock, "unet", None) is None else "UNet",
        stock=stock_images,
        optimized=optimized_images,
        stock_s=stock_s,
        optimized_s=optimized_s,
        ready_s=max(0.0, first_s - statistics.median(optimized_s)),
        peak_mb=None if stock_mb is None or optimized_mb is None else (stock_mb, optimized_mb),
        restored_equal=bool(np.array_equal(again, stock_images[0])),
        steps=steps,
        machine=device_line(device),
        report=report,
    )
