"""`accel doctor`."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from accel.commands.options import DEVICE_HELP, parse_device, user_errors
from accel.progress import progress_bar


def doctor(
    out: Annotated[Path, typer.Option(help="the JSON file, which `--replay` takes")] = Path("accel-doctor.json"),
    replay: Annotated[
        Path | None, typer.Option(help="such a file: kernels are chosen, here, as on the card that it is of")
    ] = None,
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
) -> None:
    """Examine the GPU: its size, its speed, and each kernel beside its reference; writes JSON.

    Ends with 1 where a kernel is refused or differs.
    """
    from accel_kernels.device import read_card, replayed

    from accel.bench import results
    from accel.bench.doctor import diagnose

    place, console = parse_device(device), Console()
    with ExitStack() as inside:
        known = None
        if replay is not None:
            with user_errors("--replay", OSError, ValueError):
                known = read_card(replay)
            inside.enter_context(replayed(known))
        progress = inside.enter_context(progress_bar(console))
        task = progress.add_task("", total=None)
        found = diagnose(place, lambda step: progress.update(task, description=step))
    _tell(console, found, known)
    with user_errors("--out", OSError):
        console.print(f"written to {results.write(found, out)}")
    wrong = ("differs", "failed", "was refused")
    if any(word in row["outcome"] for row in found["kernels"] for word in wrong):
        raise typer.Exit(1)


def _tell(console: Console, found: dict[str, Any], replayed_card: Any) -> None:
    from accel_kernels.device import Card, Feature

    from accel.bench.results import new_table

    known = replayed_card or (found["card"] and Card.of(found["card"]))
    if found["card"] is None:
        console.print("no GPU: accel runs plain torch, and no kernel was examined")
    if known is not None:
        major, minor = known.compute
        console.print(
            f"{'as on ' if replayed_card else ''}{known.name}: compute capability {major}.{minor}, "
            f"{known.processors} multiprocessors, {known.memory / 1e9:.1f} GB, {known.shared_memory // 1024} KB shared"
        )
        lacking = [feature.value for feature in Feature if feature not in known.features]
        console.print(f"lacks {', '.join(lacking)}" if lacking else "lacks nothing that kernels ask for")
    for name in ("bus_gb_s", "products_tflops"):
        for what, rate in found[name].items():
            console.print(f"{what}: {rate:,.1f} {'GB/s' if name == 'bus_gb_s' else 'TFLOP/s'}")
    if found["kernels"]:
        table = new_table("", "kernel", "case", "dtype", "outcome", "us", "reference us", left=4)
        for row in found["kernels"]:
            cells = (str(row.get(name, "-")) for name in ("op", "case", "dtype", "outcome", "us", "reference_us"))
            table.add_row(*cells)
        console.print(table)
