"""`accel bench llm`: a language model's generate(), stock beside accel."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from accel.commands.bench.each_model import Cell, measure_each, whole_numbers
from accel.commands.options import DEVICE_HELP, parse_device, user_errors


def bench_llm(
    model: Annotated[str, typer.Option(help="llama-8b, qwen-0.5b ... with random weights, or a folder")],
    batch: Annotated[str, typer.Option(help="rows of a step, with commas between them")] = "1,8,32",
    context: Annotated[str, typer.Option(help="tokens before it: the first with every batch")] = "512,2048",
    new_tokens: Annotated[int, typer.Option(min=2, help="steps that a time is taken over")] = 64,
    weights: Annotated[str | None, typer.Option(help="of accel.optimize, such as int8")] = None,
    activations: Annotated[str | None, typer.Option(help="of accel.optimize, with weights of the same kind")] = None,
    kv_cache: Annotated[str | None, typer.Option(help="of accel.optimize, such as int8")] = None,
    budget: Annotated[float, typer.Option(min=0.0, help="seconds a batch and context, about")] = 8.0,
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path("benchmarks/results"),
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
) -> None:
    """Time generate() of a language model stock and with accel, correctness first; writes JSON as it goes.

    Decode steps by batch and context, memory, and a prompt. Ends with 1 where it fails or is wrong.
    """
    import accel
    from accel.bench.llm.generate import measure_generate

    place, rows, contexts = parse_device(device), whole_numbers(batch), whole_numbers(context)
    given: dict[str, Any] = {"weights": weights, "activations": activations, "kv_cache": kv_cache}
    options = {name: value for name, value in given.items() if value is not None}
    with user_errors(None, ValueError):
        accel.Options(**options)

    def told(row: dict) -> Iterator[tuple[Cell, ...]]:
        for calls, ways in row["llm"].items():
            for way, one in ways.items() if "failed" not in ways else ():
                numbers = (one.get("ms_step"), "{:.2f}"), (one.get("tok_s"), "{:,.0f}"), (one["call_ms"], "{:,.1f}")
                yield calls, way, *numbers

    measure = partial(
        measure_generate, batches=rows, contexts=contexts, new_tokens=new_tokens, budget_s=budget, options=options
    )
    headings = "calls", "way", "ms a step", "tokens/s", "ms a call"
    measure_each("llm", "generate(), by stock and by accel", [model], place, out, measure, told, *headings, left=3)
