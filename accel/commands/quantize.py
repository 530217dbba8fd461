"""`accel quantize`."""

import json
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from accel.commands.options import (
    DEVICE_HELP,
    JSON_HELP,
    has_tokenizer,
    load_folder,
    parse_device,
    parse_dtype,
    parse_folder,
    user_errors,
)
from accel.options import ACTIVATIONS, HEAD, METHODS, SCHEMES, STATIC

if TYPE_CHECKING:
    from accel.llm.ptq.run import Run

INTERRUPTED = 130  # the exit code of a program that Ctrl-C stopped


def quantize(
    folder: Annotated[Path, typer.Argument(help="a language model of transformers, saved here")],
    out: Annotated[Path, typer.Option(help="where to save it: a new or empty folder, or an interrupted run's")],
    scheme: Annotated[str, typer.Option(help=f"{', '.join(SCHEMES)}; {HEAD} behind it: output head too")] = "int8",
    method: Annotated[
        str | None, typer.Option(help=f"{', '.join(METHODS)}; gptq with calibration text, rtn without")
    ] = None,
    calibration: Annotated[Path | None, typer.Option(help="a text file that the model is calibrated on")] = None,
    activations: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join((*ACTIVATIONS, *STATIC))}: rounds rows of long prompts too; int8 with smoothquant"
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=8, help="tokens of each row of the text, of 128 rows at most")] = 512,
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
    dtype: Annotated[str | None, typer.Option(help="fp16, bf16 or fp32; as it is saved by default")] = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Store a language model's weights in fewer bits, in the layout of compressed-tensors. The model stays on the CPU,
    one layer at a time goes to the device. Ctrl-C, and the same command goes on later.

    Exit code 2 for what cannot be done, with the reason, and 130 where it was interrupted.
    """
    parse_folder(folder)
    import torch
    from transformers import AutoTokenizer

    from accel.libraries.models import is_causal_lm
    from accel.llm.ptq import run
    from accel.progress import bar

    place = parse_device(device)
    kind = "auto" if dtype is None else parse_dtype(dtype, place)
    model = load_folder(folder, kind, torch.device("cpu"))
    if not is_causal_lm(model):
        raise typer.BadParameter(f"{folder} is a {type(model).__name__}, no language model", param_hint="FOLDER")
    tokenizer = AutoTokenizer.from_pretrained(folder) if has_tokenizer(folder) else None
    start = time.perf_counter()
    try:
        with user_errors(None):
            rows = None if calibration is None else _rows(model, calibration, tokenizer, tokens)
            with bar(f"quantizing to {scheme}") as at:
                done = run.quantize(model, scheme, rows, tokenizer, method, out, at, activations, place)
    except KeyboardInterrupt:
        Console(stderr=True).print(f"interrupted; the same command goes on with what {out} holds")
        raise typer.Exit(INTERRUPTED) from None
    seconds = time.perf_counter() - start
    if as_json:
        found = {"weights": done.rows, "skipped": done.skipped, "layer_seconds": done.seconds, "seconds": seconds}
        found |= {"layer_sqnr_db": done.sqnr_db, "layer_notes": done.notes}
        print(json.dumps(found | {"out": str(out)}, indent=2))
        return
    _show(Console(), done, seconds, out)


def _rows(model: Any, file: Path, tokenizer: Any, tokens: int) -> list:
    from accel.llm.ptq.calibration.batches import windows

    if tokenizer is None:
        raise typer.BadParameter("the model's folder holds no tokenizer to read it with", param_hint="--calibration")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file} is no text file: {error}", param_hint="--calibration") from None
    if not text.strip():
        raise typer.BadParameter(f"{file} is empty", param_hint="--calibration")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or tokens
    return windows(text, tokenizer, min(tokens, positions))


def _show(console: Console, done: "Run", seconds: float, out: Path) -> None:
    from accel.report import weights_table

    console.print(weights_table(done.rows))
    for reason, count in done.reasons().items():
        console.print(f"left alone: {count} ({reason})", highlight=False)
    if done.sqnr_db:
        worst, least = min(done.sqnr_db.items(), key=lambda item: item[1])
        console.print(
            f"layers on the calibration text: SQNR {least:.1f} dB at least ({worst or 'the model'}, "
            f"{10 ** (-least / 20):.2%} of "
            f"what it adds is lost), {median(done.sqnr_db.values()):.1f} dB in the median",
            highlight=False,
        )
    notes = Counter(note.removeprefix(f"{path}.") for path, notes in done.notes.items() for note in notes)
    for note, count in notes.items():
        console.print(f"note: {note} ({count} of {len(done.notes)} layers)", highlight=False)
    before, after = (sum(row[name] for row in done.rows) / 1e6 for name in ("bytes_before", "bytes_after"))
    layers = f"{len(done.seconds)} layers"
    if done.taken:
        layers += f", {done.taken} more taken from the interrupted run"
    console.print(f"{before:.1f} MB in {after:.1f} MB, {layers}, {seconds:.1f} s; saved in {out}", highlight=False)
