"""`accel demo`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from accel.commands.options import DEVICE_HELP, DTYPE_HELP, parse_device, parse_dtype, progress_bar, quiet


def demo(
    model: Annotated[Path | None, typer.Option(help="a pipeline folder; examples/models/tiny-sd-digits")] = None,
    out: Annotated[Path, typer.Option(help="where to write the picture")] = Path("accel-demo.png"),
    steps: Annotated[int, typer.Option(min=1, help="denoising steps a picture")] = 30,
    seed: Annotated[int, typer.Option(help="seed of the first digit; the others follow")] = 0,
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
    dtype: Annotated[str | None, typer.Option(help=DTYPE_HELP)] = None,
) -> None:
    """Draw ten digits stock and optimised from the same seeds, and compare them."""
    from accel import demo as drawing

    try:
        folder = drawing.find_model(model)
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error), param_hint="--model") from None
    place = parse_device(device)
    kind = parse_dtype(dtype, place)
    quiet()
    console = Console()
    with progress_bar(console) as progress:
        comparison = drawing.run(folder, place, kind, steps=steps, seed=seed, progress=progress)
    comparison.picture().save(out)
    comparison.show(console)
    console.print(f"Picture: {out}", highlight=False)
