"""`accel demo`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from accel.commands.options import DEVICE_HELP, DTYPE_HELP, parse_device, parse_dtype, quiet
from accel.progress import progress_bar

YOUR_CODE = """\
pipe = DiffusionPipeline.from_pretrained("your/model", dtype=torch.float16).to("cuda")  # or a language model
import accel
accel.optimize(pipe)  # and back again: accel.restore(pipe)"""


def demo(
    model: Annotated[Path | None, typer.Option(help="a pipeline folder; examples/models/tiny-sd-digits")] = None,
    transformer: Annotated[
        Path | None, typer.Option(help="one with a diffusion transformer; examples/models/tiny-dit-digits")
    ] = None,
    language_model: Annotated[Path | None, typer.Option(help="its folder; examples/models/tiny-lm")] = None,
    out: Annotated[Path, typer.Option(help="where to write the picture")] = Path("accel-demo.png"),
    steps: Annotated[int, typer.Option(min=1, help="denoising steps a picture")] = 30,
    prompt: Annotated[str | None, typer.Option(help="what the language model continues")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="how many tokens it writes")] = 100,
    seed: Annotated[int, typer.Option(help="seed of the text and the first digit; the others follow")] = 0,
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
    dtype: Annotated[str | None, typer.Option(help=DTYPE_HELP)] = None,
) -> None:
    """Draw ten digits by a UNet and by a transformer and continue a prompt, stock and optimized, and compare them."""
    from accel.demo import contact_sheet, continuation, digits

    given = (model, digits.MODEL, "--model"), (transformer, digits.TRANSFORMER, "--transformer")
    folders = [_found(*one, "pipeline") for one in given]
    language_folder = _found(language_model, continuation.MODEL, "--language-model", "model")
    place = parse_device(device)
    kind = parse_dtype(dtype, place)
    quiet()
    console = Console()
    with progress_bar(console) as progress:
        drawn = [digits.run(folder, place, kind, steps=steps, seed=seed, progress=progress) for folder in folders]
        text = prompt or continuation.PROMPT
        written = continuation.run(
            language_folder, place, kind, prompt=text, new_tokens=tokens, seed=seed, progress=progress
        )
    contact_sheet.stack_sheets([comparison.picture() for comparison in drawn]).save(out)
    for comparison in drawn:
        comparison.show(console)
        console.print()
    console.print(f"Picture: {out}\n", highlight=False)
    written.show(console)
    if place.type == "cpu":
        console.print(
            "\nOn a CPU there is little or nothing to win: what is no faster there runs stock. The gain is on a GPU."
        )
    console.print("\nIn your own code:\n")
    console.print(Text(YOUR_CODE, style="green"), soft_wrap=True)


def _found(folder: Path | None, shipped: Path, option: str, kind: str) -> Path:
    from accel.demo.comparison import find_folder
    from accel.saved import refuse_pickles

    try:
        found = find_folder(folder, shipped, kind)
        refuse_pickles(found)
        return found
    except (FileNotFoundError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
