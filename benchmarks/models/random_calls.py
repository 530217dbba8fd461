"""Random calls of generate() on tiny models with random weights, stock beside accel: every token must be stock's.

Rows, lengths, padding, beams, drawing, several returns, ends of text, caches that go on, and weights that change
between calls. Models are in float32, so that nothing but a near tie may tip a token; those are told apart and counted.
"""

import copy
import random
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

import accel
from accel.bench.llm.tiny import SPECIAL, VOCABULARY, build_tiny
from accel.bench.machine import provenance
from accel.bench.results import write
from accel.errors import reason_of
from accel.libraries.cache import cache_given, cache_of

NEAR = 2e-5  # of the largest logit: closer ones, the order of sums may tip
LINEAR = "qwen3_5_text,qwen3_5_moe_text,qwen3_next,olmo_hybrid,bamba,granitemoehybrid,nemotron_h,mamba2,falcon_h1"
OTHERS = "mamba,falcon_mamba,jamba,lfm2,lfm2_moe,kimi_linear,deepseek_v2,deepseek_v3,glm4_moe_lite,minicpm3,youtu"


def main(
    out: Path,
    types: Annotated[str, typer.Option(help="model types, with commas")] = f"{LINEAR},{OTHERS}",
    calls: Annotated[int, typer.Option(help="of all of them together")] = 5000,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """Writes how many calls there were of each kind, those that were wrong, and how memory grew."""
    torch.set_num_threads(1)
    names, rows = types.split(","), []
    for number, name in enumerate(names):
        share = calls * (number + 1) // len(names) - calls * number // len(names)
        rows.append({"type": name} | calls_of(name, share, random.Random(f"{seed} {name}"), torch.device(device)))
        print(rows[-1], flush=True)
        write(provenance(torch.device(device), torch.float32) | {"seed": seed, "rows": rows}, out)
    raise SystemExit(any(row["wrong"] for row in rows))


def calls_of(name: str, calls: int, draw: random.Random, device: torch.device) -> dict[str, Any]:
    """So many calls of one class, each by both models."""
    stock = build_tiny(MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[name]]).to(device).requires_grad_(False)
    stock.generation_config.pad_token_id, stock.generation_config.eos_token_id = 0, None
    ours = copy.deepcopy(stock)
    accel.optimize(ours, **({"cpu": "fuse"} if device.type == "cpu" else {"graphs": True}))
    kinds: Counter = Counter()
    wrong: list[str] = []
    memory: list[int] = []
    began = time.perf_counter()
    for number in range(calls):
        if draw.random() < 0.03:
            changed(draw, stock, ours)
            kinds["changed weights"] += 1
        kind, told = one_call(draw, stock, ours)
        kinds[kind] += 1
        if told is not None:
            wrong.append(f"call {number}, {told}")
        if number * 4 in (calls, calls * 2, calls * 3) or number == calls - 1:
            memory.append(allocated(device))
    report = accel.report(ours)
    fused = sum(rule == "decoder layer" and status == "patched" for _, rule, status, _ in report.sites)
    accel.restore(ours)
    same = all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), stock.state_dict().values(), strict=True))
    if not same or any("forward" in vars(module) for module in ours.modules()):
        wrong.append("not restored to the bit")
    return {
        "calls": calls, "kinds": dict(kinds), "fused layers": fused, "wrong": wrong, "memory": memory,
        "fallbacks": sorted({reason for _, reason, _ in report.fallbacks}), "s": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def allocated(device: torch.device) -> int:
    """Bytes of tensors on a GPU; of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def changed(draw: random.Random, *models: Any) -> None:
    """A weight is trained a little, in place or put in place of the old one, in all models alike."""
    number, way, factor = draw.randrange(10**6), draw.randrange(2), 1 + draw.uniform(-0.1, 0.1)
    for model in models:
        parameters = list(model.parameters())
        one = parameters[number % len(parameters)]
        if way == 0:
            one.mul_(factor)
        else:
            one.data = one.data * factor


def one_call(draw: random.Random, stock: Any, ours: Any) -> tuple[str, str | None]:
    """Its kind; in words what was wrong, or None."""
    rows, new = draw.randint(1, 5), draw.randint(1, 9)
    tokens = draw.choice((1, 2, draw.randint(3, 20), draw.randint(21, 70)))
    numbers = torch.Generator().manual_seed(draw.randrange(2**31))
    ids = torch.randint(SPECIAL, VOCABULARY, (rows, tokens), generator=numbers)
    mask = torch.ones_like(ids)
    if padded := rows > 1 and tokens > 1 and draw.random() < 0.5:
        for row in range(rows):
            mask[row, : draw.randrange(tokens)] = 0
        mask[draw.randrange(rows)] = 1
    given: dict[str, Any] = {"max_new_tokens": new, "do_sample": False}
    kind = draw.choice(("greedy", "greedy", "beams", "drawn", "returns", "goes on", "lookup"))
    if kind == "beams":
        given |= {"num_beams": draw.randint(2, 4)}
    elif kind == "drawn":
        given |= {
            "do_sample": True,
            "temperature": 0.7,
            "top_k": draw.choice((0, 5, 50)),
            "top_p": draw.choice((0.9, 1)),
        }
    elif kind == "returns":
        beams = draw.choice((1, 3))
        given |= {"num_return_sequences": 2, "num_beams": beams, "do_sample": beams == 1}
    elif kind == "lookup":
        ids, mask, padded = ids[:1, torch.arange(tokens) % 5], mask[:1] | 1, False
        given |= {"prompt_lookup_num_tokens": draw.randint(2, 4)}
    if draw.random() < 0.3:
        given["eos_token_id"] = draw.sample(range(SPECIAL, VOCABULARY), draw.randint(1, 30))
    more = torch.randint(SPECIAL, VOCABULARY, (len(ids), draw.randint(1, 6)), generator=numbers)
    seed = draw.randrange(2**31)
    answers = [answer(model, ids, mask, given, more if kind == "goes on" else None, seed) for model in (stock, ours)]
    told = f"{kind}, {tuple(ids.shape)}, padded {padded}, {given}"
    if isinstance(answers[0], Exception) or isinstance(answers[1], Exception):
        if type(answers[0]) is type(answers[1]):
            return f"{kind}: stock raises", None
        return kind, f"{told}: {answers[0]!r} stock, {answers[1]!r} accel"
    if torch.equal(*answers):
        return kind, None
    if tipped(stock, mask, *answers):
        return f"{kind}: near tie", None
    return kind, f"{told}: {answers[0].tolist()} stock, {answers[1].tolist()} accel"


def answer(model: Any, ids: Any, mask: Any, given: dict, more: Any, seed: int) -> torch.Tensor | Exception:
    """What generate() gives. more: tokens after which it is called once more, over the cache that it returned."""
    ids, mask = ids.to(model.device), mask.to(model.device)
    torch.manual_seed(seed)
    try:
        if more is None:
            return model.generate(ids, attention_mask=mask, **given)
        first = model.generate(ids, attention_mask=mask, **given, return_dict_in_generate=True)
        longer = torch.cat([first.sequences, more.to(ids)], 1)
        mask = torch.cat([mask, mask.new_ones(len(mask), longer.shape[1] - mask.shape[1])], 1)
        past = cache_given(type(model).prepare_inputs_for_generation, cache_of(first))
        return model.generate(longer, attention_mask=mask, **past, **given)
    except Exception as error:  # what stock does not allow, accel need not
        reason_of(error)
        return error


def tipped(stock: Any, mask: torch.Tensor, theirs: torch.Tensor, mine: torch.Tensor) -> bool:
    """Whether every row parts from stock's at a token whose logit is as large as that of stock's, but for rounding.

    Of draws and beams, whose tokens are not those of the largest logits, nothing can be said.
    """
    if theirs.shape != mine.shape or len(theirs) != len(mask):
        return False
    mask = torch.cat([mask, mask.new_ones(len(mask), theirs.shape[1] - mask.shape[1])], 1).to(theirs.device)
    with torch.no_grad():
        logits = stock(theirs, attention_mask=mask, use_cache=False).logits
    for row in range(len(theirs)):
        apart = (theirs[row] != mine[row]).nonzero().flatten()
        if len(apart):
            at = int(apart[0])
            scores = logits[row, at - 1]
            gap = scores[theirs[row, at]] - scores[mine[row, at]]
            if not float(gap.abs() / scores.abs().max()) <= NEAR:
                return False
    return True
