"""Runs one of this project's own measurements by its name; without a name it lists them."""

import os
import sys
from importlib import import_module

import torch
import typer

STUDIES = {  # name: module, and a line of what it measures
    "ops": ("kernels.ops", "every op's kernel beside torch's, attention by each backend"),
    "experts": ("kernels.experts", "experts of one layer, every way to multiply them"),
    "products": ("kernels.products", "products by kernel, format, tile and rows; --study names what is multiplied"),
    "quality": ("quality.measure", "perplexity on held-out text by how a model is stored"),
    "plots": ("plots.draw", "docs/images from benchmarks/results"),
    "adapters-soak": ("models.adapters_soak", "random changes of adapters on tiny models: results must be stock's"),
    "kernels-of": ("models.launches", "where the GPU's time of one forward goes, kernel by kernel"),
    "collectives": ("cards.collectives", "torchrun: sums and exchanges over the cards of one host"),
    "cards-text": ("cards.text", "torchrun: a language model divided over cards"),
    "cards-diffusion": ("cards.diffusion", "torchrun: SDXL and Flux on several cards"),
}


def main() -> None:
    name, *words = sys.argv[1:] or [""]
    if name not in STUDIES:
        listed = "\n".join(f"  {one:18} {about}" for one, (_, about) in STUDIES.items())
        raise SystemExit(f"usage: python -m benchmarks NAME [OUT.json] ... (NAME --help tells more)\n{listed}")
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    place, _, function = STUDIES[name][0].partition(":")
    module = import_module(f"benchmarks.{place}")
    run = getattr(module, function or "main")
    run.__doc__ = f"{module.__doc__}\n\n{run.__doc__ or ''}"
    sys.argv = [f"python -m benchmarks {name}", *words]
    with torch.no_grad():
        typer.run(run)


if __name__ == "__main__":
    main()
