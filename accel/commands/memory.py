"""`accel plan` and `accel bench memory`: what a model does within a budget of a GPU's memory, told and measured."""

from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from accel.commands.bench.each_model import Cell, measure_each
from accel.commands.options import DEVICE_HELP, parse_device, quiet, user_errors

if TYPE_CHECKING:
    import torch
    from torch import nn

STORED = {"fp8": 8, "fbgemm_fp8": 8, "mxfp4": 4}  # bits, by methods whose `quantization_config` has no number of them
IMAGE_TOKENS = 4608  # of 1024 x 1024 pixels and a prompt, in a diffusion transformer whose inputs are not known


def plan(
    model: Annotated[str, typer.Argument(help="a folder, or a name of `accel bench` or `accel bench llm`")],
    memory: Annotated[str, typer.Option(help="as of accel.optimize: 12GB, 12GiB")] = "12GB",
    bus: Annotated[float, typer.Option(help="GB/s from pinned memory; measured where there is a GPU")] = 25.0,
    tflops: Annotated[float, typer.Option(help="of products in 16 bits; measured where there is a GPU")] = 70.0,
    bandwidth: Annotated[float, typer.Option(help="GB/s of the GPU's memory; measured where there is a GPU")] = 900.0,
    weights: Annotated[str | None, typer.Option(help="as of accel.optimize")] = None,
) -> None:
    """Tell which blocks stay on the GPU within a budget, which stream, and the seconds a step. Nothing is loaded."""
    import torch
    from rich.table import Table

    from accel.bench.diffusion.streaming import on_paper, speeds
    from accel.offload.blocks import nbytes
    from accel.offload.hooks import comes_whole
    from accel.options import Options, bytes_of
    from accel.planning.memory import stay_together
    from accel.saved import INDEX

    with user_errors("--memory", ValueError):
        if not (budget := bytes_of("memory", memory)):
            raise ValueError(f"{memory}: a plan is for a size, such as 12GB")
    with user_errors("--weights", ValueError):
        Options(weights=weights)
    for option, speed in {"--bus": bus, "--tflops": tflops, "--bandwidth": bandwidth}.items():
        if not 0 < speed < inf:
            raise typer.BadParameter(f"{speed}: give a number above 0", param_hint=option)
    known = {"bus": bus * 1e9, "rate": tflops * 1e12, "memory": bandwidth * 1e9}
    if torch.cuda.is_available():
        known = speeds(torch.device("cuda"))
    quiet()
    columns = "on the GPU GB", "moved GB a step", "s a step", "all there"
    table = Table("part", "weights GB", "blocks", "stream", "experts there", *columns)
    parts = _parts(model)
    models = {name: part for name, (part, *_) in parts.items()}
    _quantize(models, model, weights)
    pipeline = Path(model, INDEX).is_file()
    stay = pipeline and stay_together(models.values(), budget)
    for name, (part, flops, beside) in parts.items():
        others = sum(nbytes(one) for one in models.values() if one is not part) if stay else 0
        whole = pipeline and (stay or comes_whole(part, budget))
        row = on_paper(part, flops, beside, budget - others, known, whole)
        numbers = (f"{row[key]:.2f}" for key in ("on_card_gb", "moved_gb"))
        seconds = (f"{row[key]:.4f}" for key in ("seconds", "resident_s"))
        streamed = "comes whole" if whole and not stay else str(row["streamed"])
        counts = str(row["blocks"]), streamed if row["fits"] else "does not fit", row["experts"]
        table.add_row(name or type(part).__name__, f"{row['weights_gb']:.2f}", *counts, *numbers, *seconds)
    Console().print(table)


def _parts(model: str) -> "dict[str, tuple[nn.Module, float, int | None]]":
    """Models of this name or folder, without values; a call's operations, and its bytes beside weights, if known."""
    import torch
    from torch.utils._pytree import tree_map

    from accel.bench.diffusion.cases import CASES
    from accel.bench.llm.configs import CONFIGS
    from accel.bench.llm.models import config_of, from_config
    from accel.saved import without_values

    meta = torch.device("meta")
    if model in CASES:
        case = CASES[model]
        part = case.build(meta, case.dtype)
        given = case.inputs(torch.device("cpu"), case.dtype)[0]
        given = tree_map(lambda one: one.to(meta) if isinstance(one, torch.Tensor) else one, given)
        return {model: (part, *_needs(part, lambda: case.call(part, given)))}
    if model in CONFIGS:
        part = from_config(config_of(model), meta, torch.bfloat16)
        return {model: (part, 2.0 * sum(p.numel() for p in part.parameters()), None)}
    with user_errors("MODEL"):
        return {name: (part, *_needs(part)) for name, part in without_values(Path(model)).items()}


def _quantize(parts: "dict[str, nn.Module]", model: str, weights: str | None) -> None:
    """Gives models without values the sizes that they are stored in, or that accel.optimize would give them."""
    from accel.bench.diffusion.streaming import in_fewer_bits, left_as_they_are
    from accel.families import quantized_among

    with user_errors("MODEL", AttributeError, TypeError, ValueError):
        stored = {name: _stored(Path(model, name, "config.json")) for name in parts}
    with user_errors("--weights", ValueError):
        found = quantized_among(parts, weights) if weights is not None else set()
        if weights is not None and not found:
            raise ValueError(f"{weights}: for causal language models, encoders and denoisers; {model} holds none")
    for name, part in parts.items():
        if (scheme := stored[name]) is not None:
            in_fewer_bits(part, scheme)
        elif weights is not None and name in found:
            in_fewer_bits(part, weights, left_as_they_are(part, weights))


def _stored(file: Path) -> str | None:
    """The scheme of about as many bits as a file's `quantization_config` says that matrices are stored in."""
    from accel.saved import read_json

    said = read_json(file).get("quantization_config") if file.is_file() else None
    if not isinstance(said, dict):
        return None
    groups = [said, *(said.get("config_groups") or {}).values()]
    bits = [one.get(name) for one in groups for name in ("bits", "w_bit", "nbits")]
    bits += [one["weights"].get("num_bits") for one in groups if isinstance(one.get("weights"), dict)]
    bits += [number for number in (4, 8) if said.get(f"load_in_{number}bit") is True]
    least = min((one for one in (*bits, STORED.get(str(said.get("quant_method")))) if type(one) is int), default=16)
    return {4: "int4", 8: "int8"}.get(least)


def _needs(part: "nn.Module", call: Any = None) -> tuple[float, int | None]:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from accel.bench.memory import peak_on_paper
    from accel.diffusion.linears import denoises
    from accel.errors import logged

    numbers = float(sum(p.numel() for p in part.parameters()))
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counted:
            call()
        return float(counted.get_total_flops()), peak_on_paper(call)
    except Exception as error:  # whatever code for values does with none, or inputs that are not known
        logged(error)
        return 2 * numbers * (IMAGE_TOKENS if denoises(part) else 1), None


def bench_memory(
    names: Annotated[list[str] | None, typer.Argument(help="of `accel bench` or `accel bench llm`; flux")] = None,
    budgets: Annotated[str, typer.Option(help="with commas between them")] = "24GB,16GB,12GB,8GB",
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path("benchmarks/results"),
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
    weights: Annotated[str | None, typer.Option(help="as of accel.optimize; int4 for language models")] = None,
    stock: Annotated[bool, typer.Option(help="time stock's offload too, of image models")] = True,
) -> None:
    """Time a model within budgets of memory and on the card: four calls, by stock's model and group offload too; of a
    language model a text of 128 tokens.

    Random weights; writes JSON. Ends with 1 where one fails.
    """
    from accel.bench.budgets import measure_text
    from accel.bench.diffusion.streaming import measure_budgets
    from accel.bench.llm.configs import CONFIGS

    def measure(name: str, place: "torch.device") -> Iterator[dict]:
        caps, found = budgets.split(","), {}
        text = measure_text(name, place, caps, weights or "int4") if name in CONFIGS else None
        for key, one in text or measure_budgets(name, place, caps, weights, stock):
            typer.echo(f"{name}, {key}: {one}")
            found[key] = one
            yield {"name": name, "memory": found}

    def told(row: dict) -> Iterator[tuple[Cell, ...]]:
        for key, one in row["memory"].items():
            numbers = ("s", "{:.3f}"), ("tokens_s", "{:.1f}"), ("peak_gb", "{:.2f}"), ("streamed_gb", "{:.2f}")
            more = ("ready_s", "{:.1f}"), ("error", "{:.1e}"), ("experts", "{}"), ("read_there", "{:.0%}")
            yield key, *((one.get(name), form) for name, form in (*numbers, *more))

    place = parse_device(device)
    about = "calls within a budget of the GPU's memory, beside the model on it as a whole"
    headings = "4 calls, s", "tok/s", "peak GB", "moved GB a call", "ready s", "error", "experts there", "of those read"
    measure_each("memory", about, names or ["flux"], place, out, measure, told, "", *headings)
