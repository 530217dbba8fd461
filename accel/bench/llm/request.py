"""What `accel bench llm` and `accel bench batch` measure: their options, from which the commands are made."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from accel.bench.llm.configs import CONFIGS
from accel.options import ACTIVATIONS, KV_CACHE, WEIGHTS

# Parts of `accel bench llm` in their order, and the share of the time that is kept for each while those before it are
# at work.
PARTS = {"decode": 0.35, "prefill": 0.1, "modes": 0.2, "long": 0.1, "memory": 0.05, "stalls": 0.1, "ready": 0.1}
IN_FLIGHT = (1, 8, 32, 128, 512)  # requests at a time, of the workloads that tell how their number counts
WORKLOADS = (
    *("different lengths", "questions", "rollouts", "nothing shared", "shared prompt"),
    *(f"{number} in flight" for number in IN_FLIGHT),
    "long",
)


class Listed(tuple):
    """Values that a user gives with commas between them, and sees so."""

    def __str__(self) -> str:
        return ",".join(map(str, self))


def parse_numbers(given: str | tuple) -> Listed:
    """Of "1,8,32". Raises BadParameter for anything else."""
    try:
        found = Listed(map(int, str(given).split(",")))
    except ValueError:
        found = Listed()
    if not found or min(found) < 1:
        raise typer.BadParameter(f"{str(given)!r}: give numbers with commas between, such as 1,8,32")
    return found


def names_of(valid: tuple[str, ...]) -> Callable[[str | tuple], Listed]:
    """A parser of names with commas between them, which raises BadParameter for one that is not valid."""

    def parse(given: str | tuple) -> Listed:
        found = Listed(filter(None, str(given).split(",")))
        if unknown := [name for name in found if name not in valid]:
            raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(valid)}")
        return found

    return parse


def weights_and_cache(given: str | tuple) -> Listed:
    """Of "int8,int8", or nothing of "none"."""
    found = Listed() if str(given) == "none" else Listed(str(given).split(","))
    if found and (len(found) != 2 or found[0] not in WEIGHTS or found[1] not in KV_CACHE):
        valid = f"one of {', '.join(WEIGHTS)}, a comma, and one of {', '.join(KV_CACHE)}; or none"
        raise typer.BadParameter(f"{str(given)!r}: give {valid}")
    return found


@dataclass(frozen=True)
class ModelRequest:
    """A language model by its name or folder."""

    model: Annotated[
        str, typer.Option(help="llama-8b, qwen-0.5b ... with random weights, or a folder; an unknown name lists them")
    ]

    @property
    def name(self) -> str:
        if self.model in CONFIGS:
            return self.model
        return re.sub(r"[^A-Za-z0-9.]+", "-", Path(self.model).resolve().name).strip("-")

    @property
    def filled(self) -> str:
        """With what."""
        return "random weights" if self.model in CONFIGS else "saved weights"


@dataclass(frozen=True)
class LlmRequest(ModelRequest):
    """What `accel bench llm` measures."""

    batch: Annotated[Listed, typer.Option(parser=parse_numbers, help="rows of a decode step")] = Listed((1, 8, 32))
    context: Annotated[
        Listed, typer.Option(parser=parse_numbers, help="tokens of the prompt: the first with every batch")
    ] = Listed((512, 2048, 8192))
    new_tokens: Annotated[int, typer.Option(min=2, help="steps a decode time is taken over")] = 64
    long: Annotated[int, typer.Option(min=1, help="tokens of the past in the part `long`")] = 32768
    long_batch: Annotated[Listed, typer.Option(parser=parse_numbers, help="rows of the part `long`")] = Listed((1,))
    parts: Annotated[Listed, typer.Option(parser=names_of(tuple(PARTS)), help="which of them")] = Listed(PARTS)
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="decode by stock's static cache under torch.compile too")
    ] = False
    weights: Annotated[
        Listed,
        typer.Option(
            parser=names_of(WEIGHTS), help="schemes of accel.optimize(weights=...) to measure beside, such as int8,int4"
        ),
    ] = Listed()
    kv_cache: Annotated[
        Listed,
        typer.Option(
            parser=names_of(KV_CACHE),
            help="kinds of accel.optimize(kv_cache=...) to measure beside, alone and with --weights",
        ),
    ] = Listed()
    activations: Annotated[
        Listed,
        typer.Option(
            parser=names_of(ACTIVATIONS), help="kinds of accel.optimize(activations=...), with weights of the same kind"
        ),
    ] = Listed()
    seconds: Annotated[float, typer.Option(min=0.1, help="after so many, nothing new is begun")] = 280.0


@dataclass(frozen=True)
class BatchRequest(ModelRequest):
    """What `accel bench batch` measures."""

    workloads: Annotated[Listed, typer.Option(parser=names_of(WORKLOADS), help="which of them")] = Listed(WORKLOADS)
    lossy: Annotated[
        Listed,
        typer.Option(parser=weights_and_cache, help="weights and kv_cache to measure beside, or none"),
    ] = Listed(("int8", "int8"))
    most_tokens: Annotated[
        int | None, typer.Option(min=8, help="shorten workloads to so many tokens a request, as for a small model")
    ] = None
    stock_seconds: Annotated[
        float,
        typer.Option(
            min=0.1, help="about how long stock may take at each workload; it gets fewer requests and new tokens"
        ),
    ] = 20.0
    seconds: Annotated[float, typer.Option(min=0.1, help="after so many, nothing new is begun")] = 500.0
