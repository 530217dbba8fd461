"""How a model's step shrinks with cards, by calculation from one card's figures and the links'. Needs no GPU.

Prints the tables of docs/measurements/scaling.md. Inputs are measured: what `accel bench llm` wrote of one card, and
the all-reduces of nvidia-h200-links.json. What `cards-text` measured on several cards stands beside the calculation,
a dash where benchmarks/results has none.
"""

import json
from collections.abc import Iterator
from typing import NamedTuple

import numpy

from accel.bench.llm.configs import CONFIGS
from benchmarks.study import RESULTS

ELEMENT = 2  # bytes of bfloat16, in which sums travel
REDUCTIONS = 2  # a layer: behind attention and behind the MLP
INFINIBAND = 50.0  # GB/s, 400 Gb/s a card
HOST = 8  # cards
BEFORE, PROMPT = 512, 2048  # tokens, of the steps and the prompt that are measured on several cards
FIGURES = {"rows": "step_ms", "prompt": "prompt_ms"}  # what files call them, and their milliseconds


class Links:
    """All-reduces as they were measured, the fastest way for each size. measured: what the file of links holds."""

    def __init__(self, measured: dict):
        self.points: dict[int, dict[int, float]] = {}
        for way in measured["all_reduce_us"].values():
            for cards, times in way.items():
                known = self.points.setdefault(int(cards), {})
                known |= {int(size): min(us, known.get(int(size), us)) for size, us in times.items()}

    def all_reduce(self, cards: int, size: float) -> float:
        """Milliseconds of one, of `size` bytes: between two sizes that were measured, on the line through both; of
        larger ones on the last line. Of 8 cards, which were not measured: as much above 4 as 4 is above 2. 0 for one
        card. Raises ValueError for others.
        """
        if cards == 1:
            return 0.0
        if cards == 8:
            return 2 * self.all_reduce(4, size) - self.all_reduce(2, size)
        if cards not in self.points:
            raise ValueError(f"cards={cards}: all-reduces are known of 1, 2, 4 and 8 cards of one host")
        sizes, times = zip(*sorted(self.points[cards].items()), strict=True)
        beyond = max(0.0, size - sizes[-1]) * (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
        return (float(numpy.interp(size, sizes, times)) + beyond) / 1e3


class Step(NamedTuple):
    """One card's step, in milliseconds: reading, which N cards divide; rest, which they do not. size: bytes of one
    all-reduce. layers: of the model.
    """

    batch: int
    before: int
    reading: float
    rest: float
    size: int
    layers: int

    def on(self, cards: int, links: Links) -> float:
        """Milliseconds on so many cards."""
        return self.reading / cards + self.rest + REDUCTIONS * self.layers * links.all_reduce(cards, self.size)


def decoding(model: str, one: dict) -> Iterator[Step]:
    """The steps of decoding that were measured on one card. one: what `accel bench llm` wrote."""
    sizes, shape = one["sizes"], CONFIGS[model][1]
    for row in one["parts"]["decode"]:
        batch, before = row["batch"], row["context"]
        gigabytes = sizes["read_a_step_gb"] + batch * before * sizes["cache_a_token_kb"] / 1e6
        reading = 1e3 * gigabytes / one["copy_bandwidth_gb_s"]
        size = batch * shape["hidden_size"] * ELEMENT
        yield Step(batch, before, reading, row["accel"]["ms_step"] - reading, size, shape["num_hidden_layers"])


def prompts(model: str, one: dict) -> Iterator[Step]:
    """Prompts that were measured on one card, of which all is taken to be products, which N cards divide."""
    shape = CONFIGS[model][1]
    for row in one["parts"]["prefill"]:
        size = row["tokens"] * shape["hidden_size"] * ELEMENT
        yield Step(1, row["tokens"], row["accel"]["ms"], 0.0, size, shape["num_hidden_layers"])


def table(steps: list[Step], links: Links, measured: list[dict]) -> Iterator[str]:
    """Lines of Markdown: milliseconds, of them reductions, the speed-up, its share of the cards, what was measured."""
    yield "| batch | tokens before | cards | ms | of them all-reduce | speed-up | of the cards | measured, ms |"
    yield "|---|---|---|---|---|---|---|---|"
    known = {(one["gpus"], one["batch"], one["before"]): one["ms"] for one in measured}
    for step in steps:
        for cards in (1, 2, 4, 8):
            ms, one = step.on(cards, links), step.on(1, links)
            reductions = REDUCTIONS * step.layers * links.all_reduce(cards, step.size)
            found = known.get((cards, step.batch, step.before))
            told = f"{one:.2f}" if cards == 1 else "-" if found is None else f"{found:.2f}"
            share = f"{one / ms:.2f} | {one / ms / cards:.0%}"
            yield f"| {step.batch} | {step.before} | {cards} | {ms:.2f} | {reductions:.2f} | {share} | {told} |"


def on_several_cards(model: str, results: list[dict], gpu: str) -> Iterator[dict]:
    """Steps and prompts of a model that were measured on such cards: gpus, batch, before, ms. results: what files hold.

    A file of other cards says nothing of what is calculated from one of these.
    """
    for result in results:
        if result.get("case") != "many-cards-text" or result["machine"]["gpu"] != gpu:
            continue
        for row in result["models"]:
            if row["model"] == model and "accel" in row:
                for name, told in row["accel"].items():
                    kind, _, rows = name.partition(" ")
                    if kind in FIGURES:
                        batch, before = (int(rows), BEFORE) if rows else (1, PROMPT)
                        ms = told[FIGURES[kind]]
                        yield {"kind": kind, "gpus": result["ranks"], "batch": batch, "before": before, "ms": ms}


def most_across_hosts(step: Step, links: Links) -> tuple[float, float, float]:
    """Microseconds: what an all-reduce over two hosts of 8 cards may take until a step is no faster than on one host;
    what it takes of that on one host; what its bytes alone take on the link between hosts.
    """
    saved = step.reading / HOST - step.reading / (2 * HOST)
    within = links.all_reduce(HOST, step.size)
    return 1e3 * (within + saved / (REDUCTIONS * step.layers)), 1e3 * within, step.size / INFINIBAND / 1e3


def read(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def main(model: str = "llama-8b") -> None:
    """model: of which one card's figures are there."""
    one, links = read(f"nvidia-h200-llm-{model}.json"), Links(read("nvidia-h200-links.json"))
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    measured = list(on_several_cards(model, results, one["machine"]["gpu"]))
    decodes = list(decoding(model, one))
    print(f"{model}, a token\n")
    print("\n".join(table(decodes, links, [one for one in measured if one["kind"] == "rows"])))
    print(f"\n{model}, a prompt\n")
    print("\n".join(table(list(prompts(model, one)), links, [one for one in measured if one["kind"] == "prompt"])))
    print("\nan all-reduce over two hosts of 8 cards, microseconds\n")
    print("| batch | tokens before | pays up to | on one host | bytes alone, between hosts |\n|---|---|---|---|---|")
    for step in decodes:
        cells = " | ".join(f"{us:.1f}" for us in most_across_hosts(step, links))
        print(f"| {step.batch} | {step.before} | {cells} |")
