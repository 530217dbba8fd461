"""`accel bench encoders`, `vision`, `pictures` and `speech`, by stock and by accel."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from accel.commands.bench.each_model import Cell, chosen_models, measure_each, whole_numbers
from accel.commands.options import DEVICE_HELP


def bench_encoders(
    names: Annotated[list[str] | None, typer.Argument(help="such as bge-m3; all by default")] = None,
    texts: Annotated[int, typer.Option(min=1, help="how many")] = 512,
    batch: Annotated[int, typer.Option(min=1, help="how many at a time")] = 64,
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile too, which takes minutes")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="products in int8 too, and what they lose")] = False,
    budget: Annotated[float, typer.Option(min=0.0, help="seconds a way, about")] = 4.0,
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path("benchmarks/results"),
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
) -> None:
    """Time text encoders over texts of 10 to 500 tokens, by stock and by accel, in turns; writes JSON.

    Random weights; without a tokenizer. Ends with 1 where one fails.
    """
    from accel.bench.encoders.texts import ENCODERS, measure_encoder

    place, chosen = chosen_models(names, device, ENCODERS)

    def told(row: dict) -> Iterator[tuple[Cell, ...]]:
        for way, one in row["ways"].items():
            query, lost = row.get("query", {}).get(way, {}).get("median_ms"), (row["errors"], row["similarities"])
            numbers = (one["tokens_s"], "{:,}"), (one["median_ms"], "{:,.1f}"), (query, "{:.2f}")
            yield way, *numbers, *((one.get(way), "{:.1e}") for one in lost)

    measure = partial(measure_encoder, count=texts, size=batch, compiled=compiled, budget_s=budget, int8=int8)
    about = "text encoders over texts of different lengths, by stock and by accel"
    headings = "way", "tokens/s", "ms", "query ms", "error", "cosine off"
    measure_each("encoders", about, chosen, place, out, measure, told, *headings)


def bench_vision(
    names: Annotated[list[str] | None, typer.Argument(help="such as siglip-so400m; all by default")] = None,
    batch: Annotated[str, typer.Option(help="images at a time, with commas between them")] = "1,32",
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile too, which takes minutes")] = False,
    budget: Annotated[float, typer.Option(min=0.0, help="seconds a way, about")] = 2.0,
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path("benchmarks/results"),
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
) -> None:
    """Time vision transformers over batches of images, by stock and by accel, in turns; writes JSON.

    Random weights. Ends with 1 where one fails.
    """
    from accel.bench.encoders.vision import VISION, measure_vision

    place, chosen = chosen_models(names, device, VISION)
    sizes = whole_numbers(batch)

    def told(row: dict) -> Iterator[tuple[Cell, ...]]:
        for part in row["batches"]:
            for way, one in part["ways"].items():
                numbers = (one["images_s"], "{:,.0f}"), (one["median_ms"], "{:,.2f}")
                yield str(part["batch"]), way, *numbers, (part["errors"].get(way), "{:.1e}")

    measure = partial(measure_vision, batches=sizes, compiled=compiled, budget_s=budget)
    about = "vision transformers over batches of images, by stock and by accel"
    headings = "batch", "way", "images/s", "ms", "error"
    measure_each("vision", about, chosen, place, out, measure, told, *headings, left=3)


def bench_pictures(
    names: Annotated[list[str] | None, typer.Argument(help="such as qwen3-vl-2b; all by default")] = None,
    budget: Annotated[float, typer.Option(min=0.0, help="seconds a way and kind of call, about")] = 2.0,
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path("benchmarks/results"),
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
) -> None:
    """Time prompts with pictures and tokens behind them, by stock and by accel, in turns; writes JSON.

    Random weights; without a processor. Ends with 1 where one fails.
    """
    from accel.bench.encoders.pictures import MODELS, measure_pictures

    place, chosen = chosen_models(names, device, MODELS)

    def told(row: dict) -> Iterator[tuple[Cell, ...]]:
        for kind, ways in row["pictures"].items():
            yield kind, *((ways[way]["median_ms"], "{:,.2f}") for way in ("stock", "accel"))

    about = "prompts with pictures, by stock and by accel"
    measure = partial(measure_pictures, budget_s=budget)
    measure_each("pictures", about, chosen, place, out, measure, told, "call", "stock ms", "accel ms")


def bench_speech(
    names: Annotated[list[str] | None, typer.Argument(help="large-v3, turbo; both by default")] = None,
    clips: Annotated[int, typer.Option(min=1, help="of 30 s, in a batch")] = 64,
    windows: Annotated[int, typer.Option(min=2, help="of 30 s, in each of 16 long recordings")] = 4,
    budget: Annotated[float, typer.Option(min=0.0, help="seconds a way, about")] = 5.0,
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path("benchmarks/results"),
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
) -> None:
    """Time Whisper's generate(), by stock and by accel, in turns: a clip, a batch, long recordings; writes JSON.

    Random weights; features are made before; every window gives as many tokens. Ends with 1 where one fails.
    """
    from accel.bench.encoders.speech import SPEECH, measure_speech

    place, chosen = chosen_models(names, device, SPEECH)

    def told(row: dict) -> Iterator[tuple[Cell, ...]]:
        for part in row["calls"]:
            for way, one in part["ways"].items():
                numbers = (one["median_ms"], "{:,.1f}"), (one["real_time"], "{:,.0f}"), (part["same"], "{:.1%}")
                yield part["call"], way, *numbers

    measure = partial(measure_speech, clips=clips, windows=windows, budget_s=budget)
    about = "Whisper's generate(), by stock and by accel"
    headings = "call", "way", "ms", "x real time", "same tokens"
    measure_each("speech", about, chosen, place, out, measure, told, *headings, left=3)
