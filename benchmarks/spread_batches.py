"""generate_batch on one card and over several in one process, as accelerate's hooks spread a model: tokens a second.

    python benchmarks/spread_batches.py OUT.json [--model llama-8b] [--cards 2] [--requests 64,128,256] [--prompt 512]

Every token of a small batch is compared with stock's logits first. Then one card and several take turns. `s`: a call.
`step_tok_s`: of calls of many tokens and of one, so without prompts. `waits`: the share of a call in which the host
waits for ids; what is left of it is the host's own work. `of_cards`: tokens a second over those of one card and the
number of cards; `as_many`: with as many requests in all; `as_many_a_card`: with as many for each card.
"""

import copy
import json
import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

import accel
from accel.bench.llm.batch_runner import answers, checked_tokens
from accel.bench.llm.models import beside, build, spread
from accel.bench.llm.workloads import Workload
from accel.bench.machine import commit, machine, now
from accel.llm.batching.step import Flight

WARM = 3  # calls of each size before it is timed


class Waiting:
    """Seconds in which the host waited for ids of steps, of all calls inside."""

    def __enter__(self) -> "Waiting":
        self.seconds, self.read = 0.0, Flight.read
        read = self.read

        def timed(flight: Flight):
            start = time.perf_counter()
            found = read(flight)
            self.seconds += time.perf_counter() - start
            return found

        Flight.read = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Flight.read = self.read  # type: ignore[method-assign]


def timed(model, prompts: list[list[int]], new: int) -> tuple[float, float]:
    """(seconds of a call, of them waiting)."""
    for card in range(torch.cuda.device_count()):
        torch.cuda.synchronize(card)
    with Waiting() as waiting:
        start = time.perf_counter()
        answers(model, prompts, new)
        return time.perf_counter() - start, waiting.seconds


def figures(models: dict, workload: Workload, rounds: int) -> dict[str, dict]:
    """Of one number of requests, by model."""
    prompts = {name: workload.prompts(model) for name, model in models.items()}
    for name, model in models.items():
        for _ in range(WARM):
            answers(model, prompts[name], workload.new)
        answers(model, prompts[name], 1)
    found: dict[str, list] = {name: [] for name in models}
    for turn in range(rounds):
        for name, model in list(models.items())[:: 1 if turn % 2 else -1]:
            (many, waited), (few, _) = (timed(model, prompts[name], new) for new in (workload.new, 1))
            found[name].append((many, many - few, waited / many))
    result = {}
    for name, rows in found.items():
        call, steps, waits = (statistics.median(column) for column in zip(*rows, strict=True))
        result[name] = {
            "s": round(call, 4),
            "tok_s": round(workload.requests * workload.new / call, 1),
            "step_tok_s": round(workload.requests * (workload.new - 1) / steps, 1),
            "waits": round(waits, 3),
            "all_s": [round(row[0], 4) for row in rows],
        }
    return result


def of_cards(rows: list[dict], cards: int, figure: str) -> list[dict]:
    """How much of so many cards there is, for every number of requests that one card had."""
    one = {row["requests"]: row["one card"][figure] for row in rows}
    several = {row["requests"]: row["several"][figure] for row in rows}
    return [
        {
            "requests": count,
            "as_many": round(several[count] / alone / cards, 4),
            "as_many_a_card": round(several[count * cards] / alone / cards, 4) if count * cards in several else None,
        }
        for count, alone in one.items()
    ]


@torch.no_grad()
def main(
    out: Path,
    model: str = "llama-8b",
    cards: int = 2,
    requests: str = "64,128,256",
    prompt: Annotated[int, typer.Option(min=1)] = 512,
    new: Annotated[int, typer.Option(min=2, help="tokens of an answer")] = 128,
    rounds: int = 3,
) -> None:
    first = torch.device("cuda", 0)
    one = build(model, first, torch.bfloat16)
    stock = beside(one)
    several = spread(copy.deepcopy(one), cards)
    for each in (one, several):
        accel.optimize(each)
    result = {"about": f"generate_batch of {model} on one card and on {cards}", "commit": commit(), "when": now()}
    result |= {**machine(first), "cards": cards, "prompt": prompt, "new": new, "rows": []}
    result |= {"one card": checked_tokens(one, stock), "several": checked_tokens(several, stock)}
    for count in map(int, requests.split(",")):
        row = {"requests": count} | figures(
            {"one card": one, "several": several}, Workload("even", count, prompt, prompt, new), rounds
        )
        result["rows"].append(row)
        print(json.dumps(row), flush=True)
        for figure in ("tok_s", "step_tok_s"):
            result[f"of_cards, {figure}"] = of_cards(result["rows"], cards, figure)
        report = accel.report(several)
        result |= {"graphs": report.graphs, "fallbacks": [list(line) for line in report.fallbacks]}
        result["batching"] = report.batching
        out.write_text(json.dumps(result, indent=1))
    print(json.dumps({name: value for name, value in result.items() if name.startswith("of_cards")}, indent=1))
    if result["fallbacks"] or not result["batching"]:
        raise SystemExit(f"the spread model was not batched by accel: {result['fallbacks']}")


if __name__ == "__main__":
    typer.run(main)
