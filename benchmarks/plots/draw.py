"""Draws speed, ablation, adapters, decode, quantized, batches.png in docs/images from results."""

from pathlib import Path

from benchmarks.plots.images import save_ablations, save_adapters, save_speed
from benchmarks.plots.text import save_batches, save_decode, save_quantized
from benchmarks.study import RESULTS, ROOT


def main(results_of: Path = RESULTS, out: Path = ROOT / "docs" / "images") -> None:
    """results_of, out: folders."""
    drawn = [save_quantized(results_of, out / "quantized.png"), save_batches(results_of, out / "batches.png")]
    drawn += [save_decode(results_of, out / "decode.png"), save_speed(results_of, out / "speed.png")]
    save_ablations(results_of, out / "ablation.png")
    save_adapters(results_of, out / "adapters.png")
    if not any(drawn):
        raise SystemExit(f"no results of a GPU in {results_of}: run `make bench` on one first")
