"""A language model on one card and spread over several by accelerate's hooks, in one process: ms a token.

    python benchmarks/spread_cards.py OUT.json [--model llama-8b] [--cards 2] [--batch 1,8,32] [--context 512]

Logits of the spread model are compared with stock's first. Then one card with accel, several with accel, and stock on
several take turns. `step_ms`: a token of generate(), from calls of many tokens and of one. `launch_ms`: how long the
host takes to launch one step, of steps that wait for nothing; `back_to_back_ms`: such a step until the cards are done.
"""

import copy
import json
import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import DynamicCache

import accel
from accel.bench.llm.models import build, prompt, spread
from accel.bench.machine import commit, machine, now

STEPS = 40  # launched back to back
OFF = 0.02  # of the norm of the logits, that bfloat16 may be off through all layers; or 1.5 times what one card is


def everywhere() -> None:
    for card in range(torch.cuda.device_count()):
        torch.cuda.synchronize(card)


def seconds(call) -> float:
    everywhere()
    start = time.perf_counter()
    call()
    everywhere()
    return time.perf_counter() - start


def generate(model, rows: int, context: int, tokens: int) -> torch.Tensor:
    given = {name: value.to(model.device) for name, value in prompt(model, rows, context).items()}
    return model.generate(**given, max_new_tokens=tokens, do_sample=False)


def difference(ours, stock) -> float:
    """Of the logits of a prompt and of ten given words after it, relative."""
    ids = prompt(stock, 2, 48)["input_ids"].to(stock.device)
    found = []
    for model in (ours, stock):
        cache, logits = DynamicCache(config=model.config), []
        for start, end in ((0, 38), *((n, n + 1) for n in range(38, 48))):
            logits.append(model(ids[:, start:end], past_key_values=cache, use_cache=True).logits.float())
        found.append(torch.cat(logits, 1))
    return float((found[0] - found[1]).norm() / found[1].norm())


def back_to_back(model, rows: int, context: int) -> dict[str, float]:
    ids = prompt(model, rows, context)["input_ids"].to(model.device)
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    token, place = ids[:, -1:].clone(), torch.full((1, 1), context, device=ids.device)

    def step() -> None:
        model(token, position_ids=place, past_key_values=cache, use_cache=True)
        place.add_(1)

    for _ in range(STEPS):
        step()
    everywhere()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    launched = time.perf_counter() - start
    everywhere()
    taken = time.perf_counter() - start
    return {"launch_ms": round(1e3 * launched / STEPS, 3), "back_to_back_ms": round(1e3 * taken / STEPS, 3)}


@torch.no_grad()
def main(
    out: Path,
    model: str = "llama-8b",
    cards: int = 2,
    batch: str = "1,8,32",
    context: Annotated[int, typer.Option(min=1)] = 512,
    new: Annotated[int, typer.Option(min=2, help="tokens a step's time is taken over")] = 64,
    rounds: int = 5,
) -> None:
    first = torch.device("cuda", 0)
    one = build(model, first, torch.bfloat16)
    several = spread(copy.deepcopy(one), cards)
    stock = spread(copy.deepcopy(one), cards)
    accel.optimize(one)
    start = time.perf_counter()
    accel.optimize(several)
    result = {"about": f"{model} on one card and on {cards}", "commit": commit(), "when": now(), **machine(first)}
    result |= {"cards": cards, "context": context, "optimize_s": round(time.perf_counter() - start, 2)}
    result["sites"] = [list(row) for row in accel.report(several).sites if row[1] == "language model"]
    result["off"], result["off_one_card"] = difference(several, stock), difference(one, stock)
    if result["off"] > max(OFF, 1.5 * result["off_one_card"]):
        raise SystemExit(f"logits of {cards} cards are off by {result['off']:.1e}")
    models = {"one card, accel": one, f"{cards} cards, accel": several, f"{cards} cards, stock": stock}
    result["rows"] = []
    for rows in map(int, batch.split(",")):
        line: dict = {"batch": rows, **{name: {} for name in models}}
        for name, each in models.items():
            for _ in range(1 if name.endswith("stock") else 3):
                generate(each, rows, context, new)
            line[name] |= back_to_back(each, rows, context)
        times: dict[str, list] = {name: [] for name in models}
        for turn in range(rounds):
            for name, each in list(models.items())[:: 1 if turn % 2 else -1]:
                if name.endswith("stock") and turn > 1:
                    continue
                many = seconds(lambda: generate(each, rows, context, new))  # noqa: B023
                few = seconds(lambda: generate(each, rows, context, 1))  # noqa: B023
                times[name].append((many - few) / (new - 1))
        for name, found in times.items():
            line[name]["step_ms"] = round(1e3 * statistics.median(found), 3)
        of_one, of_several, _ = (line[name]["step_ms"] for name in models)
        line["more_than_one_card"] = round(of_several / of_one - 1, 4)
        result["rows"].append(line)
        print(json.dumps(line), flush=True)
        report = accel.report(several)
        result |= {"graphs": report.graphs, "fallbacks": [list(row) for row in report.fallbacks]}
        out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    typer.run(main)
