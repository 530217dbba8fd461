"""A language model on one card and spread over several by accelerate's hooks, in one process.

`spread-steps`: milliseconds a token. Logits of the spread model are compared with stock's first; then one card with
accel, several with accel, and stock on several take turns. `step_ms`: from calls of generate() of many tokens and of
one. `launch_ms`: how long the host takes to launch one step, of steps that wait for nothing; `back_to_back_ms`: such a
step until the cards are done.
`spread-batches`: tokens a second of generate_batch, after each token of a small batch was compared with stock's logits.
`step_tok_s`: of calls of many tokens and of one, so without prompts. `waits`: the share of a call in which the host
waits for ids; the rest is its own work. `of_cards`: tokens a second by those of one card and the number of cards:
`as_many` with as many requests in all, `as_many_a_card` with as many for each card.
"""

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from transformers import DynamicCache

import accel
from accel.bench.llm.batch import answers, checked_tokens
from accel.bench.llm.models import beside, build, prompt, spread
from accel.bench.llm.workloads import Workload
from accel.bench.timing import take_turns
from accel.libraries.cache import cache_given
from accel.llm.batching.step import Flight
from benchmarks.study import Study, numbers, relative_rms

STEPS = 40  # launched back to back
OFF = 0.02  # of the norm of the logits, that bfloat16 may be off through all layers; or 1.5 times what one card is
WARM = 3  # calls of each size before it is timed
FIRST = torch.device("cuda", 0)


def everywhere() -> None:
    for card in range(torch.cuda.device_count()):
        torch.cuda.synchronize(card)


def taken(call: Callable[[], object]) -> float:
    """Seconds, on all cards."""
    everywhere()
    start = time.perf_counter()
    call()
    everywhere()
    return time.perf_counter() - start


def cached(model, cache) -> dict:
    return {"use_cache": True, **cache_given(type(model).forward, cache)}


def generate(model, rows: int, context: int, tokens: int) -> torch.Tensor:
    given = {name: value.to(model.device) for name, value in prompt(model, rows, context).items()}
    return model.generate(**given, max_new_tokens=tokens, do_sample=False)


def step_s(model, rows: int, context: int, tokens: int) -> float:
    many, few = (taken(partial(generate, model, rows, context, count)) for count in (tokens, 1))
    return (many - few) / (tokens - 1)


def difference(ours, stock) -> float:
    """Of the logits of a prompt and of ten given words after it, relative."""
    ids = prompt(stock, 2, 48)["input_ids"].to(stock.device)
    found = []
    for model in (ours, stock):
        given, logits = cached(model, DynamicCache(config=model.config)), []
        for start, end in ((0, 38), *((n, n + 1) for n in range(38, 48))):
            logits.append(model(ids[:, start:end], **given).logits.float())
        found.append(torch.cat(logits, 1))
    return relative_rms(*found)


def back_to_back(model, rows: int, context: int) -> dict[str, float]:
    ids = prompt(model, rows, context)["input_ids"].to(model.device)
    given = cached(model, DynamicCache(config=model.config))
    model(ids, logits_to_keep=1, **given)
    token, place = ids[:, -1:].clone(), torch.full((1, 1), context, device=ids.device)

    def step() -> None:
        model(token, position_ids=place, **given)
        place.add_(1)

    for _ in range(STEPS):
        step()
    everywhere()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    launched = time.perf_counter() - start
    everywhere()
    whole = time.perf_counter() - start
    return {"launch_ms": round(1e3 * launched / STEPS, 3), "back_to_back_ms": round(1e3 * whole / STEPS, 3)}


def steps(
    out: Path, model: str = "llama-8b", cards: int = 2, batch: str = "1,8,32", context: int = 512, new: int = 64,
    rounds: int = 5,
):  # fmt: skip
    """new: tokens a step's time is taken over."""
    one = build(model, FIRST, torch.bfloat16)
    several, stock = (spread(copy.deepcopy(one), cards) for _ in range(2))
    accel.optimize(one)
    record = Study("spread-steps", out, f"{model} on one card and on {cards}", cards=cards, context=context, rows=[])
    record.body["optimize_s"] = round(taken(lambda: accel.optimize(several)), 2)
    record.body["sites"] = [list(row) for row in accel.report(several).sites if row[1] == "language model"]
    off, alone = (difference(each, stock) for each in (several, one))
    record.body |= {"off": off, "off_one_card": alone}
    if off > max(OFF, 1.5 * alone):
        raise SystemExit(f"logits of {cards} cards are off by {off:.1e}")
    models = {"one card, accel": one, f"{cards} cards, accel": several, f"{cards} cards, stock": stock}
    for rows in numbers(batch):
        line: dict = {"batch": rows}
        for name, each in models.items():
            for _ in range(1 if each is stock else WARM):
                generate(each, rows, context, new)
            line[name] = back_to_back(each, rows, context)
        samples = {name: partial(step_s, each, rows, context, new) for name, each in models.items()}
        times = take_turns(samples, least=2, most=2)  # stock takes long
        del samples[f"{cards} cards, stock"]
        more = take_turns(samples, least=rounds - 2, most=rounds - 2)
        for name, found in times.items():
            line[name]["step_ms"] = round(1e3 * statistics.median(found + more.get(name, [])), 3)
        of_one, of_several, _ = (line[name]["step_ms"] for name in models)
        record.body |= {"graphs": accel.report(several).graphs, "fallbacks": accel.report(several).fallbacks}
        record.add("rows", line | {"more_than_one_card": round(of_several / of_one - 1, 4)})


def batch_s(model, prompts: list[list[int]], new: int) -> tuple[float, float, float]:
    """Seconds of a call, of its steps, and the share in which it waits for ids."""
    waits, read = [0.0], Flight.read

    def timed(flight: Flight):
        start = time.perf_counter()
        found = read(flight)
        waits[0] += time.perf_counter() - start
        return found

    with mock.patch.object(Flight, "read", timed):
        many = taken(lambda: answers(model, prompts, new))
    return many, many - taken(lambda: answers(model, prompts, 1)), waits[0] / many


def batch_figures(models: dict, workload: Workload, rounds: int) -> dict[str, dict]:
    """Of one number of requests, by model."""
    prompts = {name: workload.prompts(model) for name, model in models.items()}
    for name, model in models.items():
        for new in (*[workload.new] * WARM, 1):
            answers(model, prompts[name], new)
    samples = {name: partial(batch_s, model, prompts[name], workload.new) for name, model in models.items()}
    result = {}
    for name, rows in take_turns(samples, least=rounds, most=rounds).items():
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


def batches(
    out: Path, model: str = "llama-8b", cards: int = 2, requests: str = "64,128,256", tokens: int = 512, new: int = 128,
    rounds: int = 3,
):  # fmt: skip
    """tokens: of a prompt. new: of an answer."""
    one = build(model, FIRST, torch.bfloat16)
    stock = beside(one)
    models = {"one card": one, "several": spread(copy.deepcopy(one), cards)}
    for each in models.values():
        accel.optimize(each)
    record = Study("spread-batches", out, f"generate_batch of {model} on one card and on {cards}", cards=cards, rows=[])
    record.body |= {name: checked_tokens(each, stock) for name, each in models.items()}
    for count in numbers(requests):
        row = {"requests": count} | batch_figures(models, Workload("even", count, tokens, tokens, new), rounds)
        record.body |= {f"of_cards, {figure}": of_cards([*record.body["rows"], row], cards, figure)
                        for figure in ("tok_s", "step_tok_s")}  # fmt: skip
        report = accel.report(models["several"])
        told = {"graphs": report.graphs, "fallbacks": report.fallbacks, "batching": report.batching}
        record.body |= told
        record.add("rows", row)
    record.show({name: value for name, value in record.body.items() if name.startswith("of_cards")})
    if told["fallbacks"] or not told["batching"]:
        raise SystemExit(f"the spread model was not batched by accel: {told['fallbacks']}")
