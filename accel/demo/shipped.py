"""Where the models that ship are found, what they ran on, and how their times compare."""

import statistics
from pathlib import Path

import torch

from accel.report import Report

CHECKOUT = Path(__file__).parents[2]


def find_folder(given: Path | None, shipped: Path, kind: str, index: str) -> Path:
    """The given folder; without one, what a checkout ships. FileNotFoundError where no file `index` is in it."""
    candidates = [given] if given else [shipped, CHECKOUT / shipped]
    for candidate in candidates:
        if (candidate / index).is_file():
            return candidate
    if given:
        raise FileNotFoundError(f"{given} holds no {kind} (no {index} in it)")
    raise FileNotFoundError(f"{shipped} is not here; run this in a checkout of the repository, or name a {kind} folder")


def device_line(device: torch.device) -> str:
    """What the demo runs on, in a line."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"the CPU, {threads} thread{'s' * (threads != 1)}"


def speed_ratio(stock_s: list[float], optimized_s: list[float], report: Report) -> str:
    """Of medians. Where both ran stock's code, times that overlap are one time: what lies between them is noise."""
    if report.stock_on_cpu and min(optimized_s) <= max(stock_s):
        return "as stock"
    return f"{statistics.median(stock_s) / statistics.median(optimized_s):.2f}x"
