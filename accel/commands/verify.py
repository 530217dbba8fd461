"""`accel verify`: the quality gate."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from accel.commands.options import (
    DEVICE_HELP,
    DTYPE_HELP,
    JSON_HELP,
    has_tokenizer,
    load_folder,
    parse_device,
    parse_dtype,
    parse_folder,
    user_errors,
)
from accel.progress import progress_bar


def verify(
    folder: Annotated[Path, typer.Argument(help="a diffusers pipeline or model, or a transformers model, saved here")],
    prompt: Annotated[
        str | None, typer.Option(help="what a pipeline is to draw, or a language model to read; random tokens without")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="denoising steps; 4")] = None,
    seed: Annotated[int, typer.Option(help="seed of the noise")] = 0,
    weights: Annotated[
        str | None, typer.Option(help="of accel.optimize, such as int8: lossy, so the loss is told and not judged")
    ] = None,
    activations: Annotated[
        str | None, typer.Option(help="of accel.optimize, with --weights of the same kind, such as int8")
    ] = None,
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
    dtype: Annotated[str | None, typer.Option(help=DTYPE_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Compare a saved model stock and optimized, same seed: each model and the whole image. Exit code 1 if they differ.

    A model passes where it is no more than twice as far from itself in full precision as stock is. Of a language model
    that is asked of the logits of a prompt and of decode steps; KL divergence and tokens are shown beside. What
    --weights and --activations lose is shown too: PSNR, SSIM and GMSD of images.
    """
    parse_folder(folder)
    import accel

    given: dict[str, Any] = {"weights": weights, "activations": activations}
    with user_errors(None, ValueError):
        options = accel.Options(**given)
    place = parse_device(device)
    kind = parse_dtype(dtype, place)
    console = Console()
    with progress_bar(console) as progress:
        task = progress.add_task(f"loading {folder}", total=None)
        loaded = load_folder(folder, kind, place)
        call = _call(loaded, folder, prompt, steps)
        progress.update(task, description="stock and optimized")
        with user_errors("FOLDER", TypeError, ValueError):
            quality = accel.verify(accel.optimize(loaded, options), seed=seed, **call)
    if as_json:
        print(json.dumps(quality.to_dict(), indent=2))
    else:
        console.print(quality)
    if not quality.passed:
        raise typer.Exit(1)


def _call(loaded: Any, folder: Path, prompt: str | None, steps: int | None) -> dict:
    """The example call of a pipeline with what the user wants otherwise; nothing for a model, which has its own."""
    from torch import nn

    from accel.diffusion.inputs import example_call
    from accel.llm.recording.inputs import causal

    if causal(loaded):
        if steps is not None:
            raise typer.BadParameter("--steps is for pipelines; this is a language model")
        return {} if prompt is None else _tokens(loaded, folder, prompt)
    wanted = {"prompt": prompt, "num_inference_steps": steps}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    if isinstance(loaded, nn.Module):
        if wanted:
            raise typer.BadParameter("--prompt and --steps are for pipelines; this is a single model")
        return {}
    with user_errors("FOLDER", ValueError):
        return example_call(loaded) | wanted


def _tokens(model: Any, folder: Path, prompt: str) -> dict:
    """The prompt as the folder's tokenizer writes it."""
    from transformers import AutoTokenizer

    from accel.llm.verify import tokenized

    if not has_tokenizer(folder):
        raise typer.BadParameter(f"{folder} holds no tokenizer", param_hint="--prompt")
    return tokenized(model, AutoTokenizer.from_pretrained(folder), prompt)
