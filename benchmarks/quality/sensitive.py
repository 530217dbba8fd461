"""Which layers of a denoiser lose most in 8 bits: one kind of linear at a time is quantized.

The subject is a case of `accel bench` with a denoiser, or a folder with a saved pipeline, whose denoiser is called as
the pipeline calls it: so many of its calls, from first to last. A row a kind: relative
RMS of the outputs from those of the model in its dtype, all calls together; share of the model's weights; on a GPU
milliseconds of a call by accel, and how many fewer than with nothing in 8 bits. Beside them rows `nothing`, which is
rounding alone, `default`, which is what `weights=` takes, and `all`. Kinds are told by structure: what in an attention
takes what it is given, and what comes after; in the rest of a block what gives back its width, and what is before;
modulations; what is in no block. Up to 64 rows are not rounded, so of modulations the weights alone are.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn
from torch.utils import _pytree as pytree

import accel
from accel.bench.diffusion.cases import CASES
from accel.bench.memory import release
from accel.bench.weights import SEED
from accel.diffusion.dit.block import innermost_blocks
from accel.diffusion.inputs import example_call
from accel.diffusion.linears import denoiser_linears, denoises, modulations
from accel.options import Options
from accel.planning.targets import models_in
from accel.quantization.linears import base_modules, size_reason
from accel.quantization.model import Quantization
from accel.quantization.scheme import Scheme
from accel.saved import load_saved
from benchmarks.study import DEVICE, TOY, Study, steady_ms, words

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WARM_UP, TIMED = 4, 8

Call = tuple[tuple, dict]


def of_folder(
    folder: Path, dtype: torch.dtype, prompts: list[str], steps: int, most: int
) -> tuple[nn.Module, list[Call]]:
    """The first denoiser of the pipeline, and `most` of its calls."""
    pipe = load_saved(folder, dtype, DEVICE)
    pipe.set_progress_bar_config(disable=True)
    model = next(part for part in models_in(pipe).values() if denoises(part))
    calls: list[Call] = []

    def seen(module: nn.Module, args: tuple, kwargs: dict) -> None:
        calls.append(pytree.tree_map(lambda leaf: leaf.clone() if torch.is_tensor(leaf) else leaf, (args, kwargs)))

    given = example_call(pipe) | {"num_inference_steps": steps} | ({"prompt": prompts} if prompts else {})
    handle = model.register_forward_pre_hook(seen, with_kwargs=True)
    try:
        pipe(**given, generator=torch.Generator().manual_seed(SEED))
    finally:
        handle.remove()
    places = torch.linspace(0, len(calls) - 1, min(most, len(calls))).round().int()
    return model, [calls[place] for place in places]


@torch.no_grad()
def run(model: nn.Module, call: Call) -> list[torch.Tensor]:
    args, kwargs = call
    return [leaf for leaf in pytree.tree_leaves(model(*args, **kwargs)) if torch.is_tensor(leaf)]


def kinds_of(model: nn.Module, call: Call) -> dict[str, dict[str, nn.Linear]]:
    """The linears by kind, each by path, told in one stock call; without those that it does not call."""
    paths = {module: path for path, module in base_modules(model, "", set()) if isinstance(module, nn.Linear)}
    attentions = [module for module in model.modules() if "processor" in vars(module)]
    owner = {linear: one for one in attentions for linear in paths.keys() & set(one.modules())}
    given: dict[nn.Module, set[int]] = {}
    takes: dict[nn.Module, bool] = {}  # of those called: whether it takes what its attention is given

    def entered(module: nn.Module, args: tuple, kwargs: dict) -> None:
        held = {leaf.data_ptr() for leaf in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        if module in paths:
            takes[module] = module in owner and not held.isdisjoint(given[owner[module]])
        else:
            given[module] = held

    handles = [one.register_forward_pre_hook(entered, with_kwargs=True) for one in (*attentions, *paths)]
    try:
        run(model, call)
    finally:
        for handle in handles:
            handle.remove()
    kinds = dict.fromkeys(takes, "outside")
    for _, block in innermost_blocks(model):
        own = [module for module in block.modules() if module in takes]
        width = next((linear.in_features for linear in own if linear in owner), 0)
        modulating = set(modulations(block))
        for linear in own:
            back = linear.out_features == width != linear.in_features
            out = not takes[linear] if linear in owner else back
            part = "attention" if linear in owner else "feed-forward"
            kinds[linear] = "modulation" if linear in modulating else f"{part} {'out' if out else 'in'}"
    names = sorted(set(kinds.values()))
    return {name: {paths[linear]: linear for linear in paths if kinds.get(linear) == name} for name in names}


@contextmanager
def in_8_bits(model: nn.Module, linears: dict[str, nn.Linear], scheme: str, rows: bool, fused: bool) -> Iterator[None]:
    """Inside, these are quantized. rows: their inputs too, where they are many. fused: the rest runs by accel."""
    options = Options(weights=scheme)
    swap = Quantization(model, scheme, options, linears, {}).swap if linears else None
    if swap is not None:
        swap.apply()
    try:
        if fused or (rows and linears):
            accel.optimize(model, activations=scheme if rows and linears else None)
        yield
    finally:
        accel.restore(model)
        if swap is not None:
            swap.undo()


def apart(wanted: list[list[torch.Tensor]], got: list[list[torch.Tensor]]) -> float:
    """Root mean square of the differences of all outputs by that of those wanted."""
    pairs = [(a.double(), b.double()) for x, y in zip(wanted, got, strict=True) for a, b in zip(x, y, strict=True)]
    off, size = sum(float((b - a).square().sum()) for a, b in pairs), sum(float(a.square().sum()) for a, _ in pairs)
    return (off / size) ** 0.5


def measure(
    model: nn.Module, calls: list[Call], schemes: Collection[str], rows: bool, keep: Callable[[dict], None]
) -> dict:
    """The figures; keep: is given them as they grow."""
    stock, kinds = [run(model, call) for call in calls], kinds_of(model, calls[0])
    total = sum(p.numel() for p in model.parameters())
    result: dict[str, Any] = {}

    def step(number: int) -> list[torch.Tensor]:
        return run(model, calls[number % len(calls)])

    def row(linears: dict[str, nn.Linear], scheme: str) -> dict:
        with in_8_bits(model, linears, scheme, rows, fused=not TOY):
            told = {
                "linears": len(linears),
                "share": round(sum(one.weight.numel() for one in linears.values()) / total, 4),
                "relative_rms": apart(stock, [run(model, call) for call in calls]),
                "ms": None if TOY else round(steady_ms(step, WARM_UP, TIMED), 3),
            }
        release(DEVICE)
        return told

    for scheme in schemes:
        fit = {
            kind: {
                path: one
                for path, one in members.items()
                if size_reason(*one.weight.shape, Scheme.parse(scheme)) is None
            }
            for kind, members in kinds.items()
        }
        default = denoiser_linears(model, Scheme.parse(scheme)).chosen
        every = {path: one for members in fit.values() for path, one in members.items()}
        found = result[scheme] = {"nothing": row({}, scheme)}
        for name, linears in (fit | {"default": default, "all": every}).items():
            found[name] = row(linears, scheme)
            if found[name]["ms"] is not None:
                found[name]["gained_ms"] = round(found["nothing"]["ms"] - found[name]["ms"], 3)
            keep(result)
    return result


def main(
    subject: str, out: Path, schemes: str = "int8,fp8", weights_only: bool = False, dtype: str = "", prompts: str = "",
    steps: int = 20, calls: int = 5,
):  # fmt: skip
    """subject: a case, or a folder. weights_only: rows are not rounded. dtype: bf16 on a GPU, fp32 elsewhere. Of a
    folder: prompts to draw in one call, with commas between; denoising steps; how many calls are compared.
    """
    kind, folder = DTYPES[dtype or ("fp32" if TOY else "bf16")], Path(subject)
    if subject in CASES:
        case = CASES[subject]
        model, given = case.build(DEVICE, kind), [((), kwargs) for kwargs in case.inputs(DEVICE, kind)]
        about = f"{case.about}, random weights"
    elif folder.is_dir():
        model, given = of_folder(folder, kind, words(prompts), steps, calls)
        about = f"{folder.name}, {len(given)} calls of {steps} steps"
    else:
        raise typer.BadParameter(f"{subject} is neither a folder nor one of {', '.join(CASES)}")
    if not denoises(model):
        raise typer.BadParameter(f"a {type(model).__name__} is no denoiser")
    record = Study(f"sensitive-{folder.name}", out, about, dtype=kind, schemes={})
    record.about |= {"model": type(model).__name__, "rows_rounded": not weights_only}

    def keep(found: dict) -> None:
        record.body["schemes"] = found
        record.save()

    record.show(measure(model, given, words(schemes), not weights_only, keep))
