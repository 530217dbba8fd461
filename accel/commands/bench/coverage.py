"""`accel coverage`: which language models and encoders of transformers are fused, and why not the others."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from accel.commands.options import quiet
from accel.progress import progress_bar


def coverage(
    names: Annotated[
        list[str] | None, typer.Argument(help="model types, or how they begin; all of them by default")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder for coverage.json")] = None,
    page: Annotated[Path | None, typer.Option(help="file for the tables as Markdown")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="processes at a time")] = 1,
    timeout: Annotated[float, typer.Option(min=1.0, help="seconds that a stage of one model may take")] = 60.0,
) -> None:
    """Optimize each language model, encoder and encoder-decoder of transformers, tiny, random weights, on the CPU.

    Each is fused whole, in part or stock, with the reasons, and must give stock's tokens or hidden states. Ends with 1
    where one does not.
    """
    import torch

    from accel.bench import results
    from accel.bench.encoder_coverage import share_of
    from accel.bench.llm.coverage import WRONG, coverage_page, coverage_tables, find_classes, run_coverage, summarized
    from accel.bench.machine import provenance

    try:
        classes = find_classes(names or [])
    except KeyError as error:
        unknown, every = ", ".join(map(repr, error.args)), find_classes([])
        valid = ", ".join(kind for kinds in every.values() for kind in kinds)
        raise typer.BadParameter(f"unknown: {unknown}; give of {valid}", param_hint="NAMES") from None
    quiet()
    console = Console()
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(classes))

        def keep(row: dict) -> None:
            progress.update(task, advance=1, description=row["class"])

        rows = run_coverage(classes, jobs, timeout, keep)
    console.print(*coverage_tables(rows))
    console.print(share_of(rows))
    about = {
        "case": "coverage",
        "about": "tiny models of every causal language model, encoder and encoder-decoder class of transformers",
    }
    result = about | provenance(torch.device("cpu"), torch.float32) | summarized(rows) | {"rows": rows}
    if out is not None:
        console.print(f"wrote {results.write(result, out / 'coverage.json')}", highlight=False)
    if page is not None:
        page.write_text(coverage_page(result))
        console.print(f"wrote {page}", highlight=False)
    if any(row["outcome"] == WRONG for row in rows):
        raise typer.Exit(1)
