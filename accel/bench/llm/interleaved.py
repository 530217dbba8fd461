"""Stock and accel taking turns at the same piece of work; one that fails is told, and the others go on."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from accel.bench.timing import Clock, seconds, take_turns

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_ROUNDS = 7


@dataclass(frozen=True)
class Variant:
    """A model under a name, and what generate() is told besides; `assistant` gives its helper for assisted text.

    saved: bytes of weights that its step need not read, of those of the stock model; saved_experts: of all experts of
    mixtures, of which a step reads some. kept: which share of the stock model's keys and values it does read.
    """

    name: str
    model: "PreTrainedModel"
    options: dict = field(default_factory=dict)
    assistant: "Callable[[], PreTrainedModel] | None" = None
    saved: int = 0
    saved_experts: int = 0
    kept: float = 1.0

    def generate(self, inputs: dict, tokens: int, **options: Any) -> Any:
        """So many new tokens; what generate() returns. Raises ValueError where it stopped before."""
        out = self.model.generate(**inputs, max_new_tokens=tokens, **({"do_sample": False} | self.options | options))
        length = inputs["input_ids"].shape[1] + tokens
        if out.shape[1] != length:
            raise ValueError(f"generate stopped after {out.shape[1] - length + tokens} of {tokens} tokens")
        return out


@dataclass(frozen=True)
class TimedCase:
    """One line of the results.

    about: what it is, as it stands in the result. prepare(variant): brings it to where timing starts and gives
    `sample`, which runs the work once and returns {name: seconds}. figures(median, variant): figures from the medians
    of those; raises ValueError where they give none.
    variants: names of those that take part; None for all but the compiler, which is slow to get ready.
    """

    part: str
    about: dict
    prepare: Callable[[Variant], Callable[[], dict[str, float]]]
    figures: Callable[[dict[str, float], Variant], dict]
    variants: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        return case_name(self.about)


def case_name(about: Mapping) -> str:
    """Of a case, for a reader."""
    return ", ".join(f"{key} {value}" if key != "mode" else str(value) for key, value in about.items())


@torch.no_grad()
def interleaved(
    case: TimedCase,
    variants: list[Variant],
    device: torch.device,
    budget_s: float,
    fail: Callable[[str, Exception], None],
) -> dict[str, dict]:
    """Figures of each variant, those that failed left out and told by fail(variant name, error).

    Each is run twice to warm up; first_s is the first of these. Then they take turns, forwards and backwards, for about
    budget_s seconds, every one at least twice.
    """
    named = {variant.name: variant for variant in variants}

    def warm_up(variant: Variant) -> tuple[Callable, float]:
        sample = case.prepare(variant)
        first = seconds(sample, device)
        sample()
        return sample, first

    made = {name: partial(warm_up, variant) for name, variant in named.items()}
    warm = {name: one for name, [one] in take_turns(made, least=1, most=1, fail=fail).items()}
    samples = {name: sample for name, (sample, _) in warm.items()}
    found = take_turns(samples, most=MOST_ROUNDS, clock=Clock(budget_s), fail=fail)

    def figures(name: str) -> dict:
        rows = found[name]
        median = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        return case.figures(median, named[name]) | {"first_s": round(warm[name][1], 3), "rounds": len(rows)}

    told = {name: partial(figures, name) for name in found}
    return {name: row for name, [row] in take_turns(told, least=1, most=1, fail=fail).items()}
