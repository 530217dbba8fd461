"""`accel shard`."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from accel.commands.options import JSON_HELP, parse_folder, quiet, user_errors


def shard(
    folder: Annotated[Path, typer.Argument(help="a language model of transformers, saved here; quantized ones too")],
    tp: Annotated[int, typer.Option(min=2, help="among how many ranks its weights are divided")],
    out: Annotated[Path, typer.Option(help="where the files are written: a new or empty folder")],
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Divide a language model's weights into files for ranks, as transformers' tensor parallelism divides them.
    accel.load(OUT) under torchrun --nproc-per-node TP has each rank read its own files alone.

    A rank's part of one layer is in memory at a time. Exit code 2 for what cannot be divided so, with the reason.
    """
    parse_folder(folder)
    quiet()
    from accel.llm.shards.divide import divide
    from accel.progress import bar

    start = time.perf_counter()
    with user_errors(None, ValueError, OSError), bar(f"dividing among {tp} ranks") as at:
        manifest = divide(folder, out, tp, at)
    seconds = time.perf_counter() - start
    by_rank = [sum(file.bytes for file in files) for files in manifest.files]
    divided = sum(division is not None for _, division in manifest.tensors.values())
    if as_json:
        told = {"ranks": tp, "bytes": by_rank, "tensors": len(manifest.tensors), "divided": divided}
        print(json.dumps(told | {"plan": manifest.plan, "seconds": seconds, "out": str(out)}, indent=2))
        return
    console = Console()
    for rank, size in enumerate(by_rank):
        console.print(f"rank {rank}: {size / 1e6:.1f} MB in {len(manifest.files[rank])} files", highlight=False)
    console.print(
        f"{divided} of {len(manifest.tensors)} tensors divided, the others whole on every rank; {seconds:.1f} s; "
        f"written to {out}",
        highlight=False,
    )
