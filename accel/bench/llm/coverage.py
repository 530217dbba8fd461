"""Which classes of transformers are fused, each tiny and in a process of its own: decoders, encoders, both."""

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from accel.bench.encoder_coverage import encoder_kinds, examine_encoder, share_of
from accel.bench.llm.tiny import PROMPT
from accel.bench.outcomes import (
    ENDED,
    MEANING,
    NOT_BUILT,
    OUTCOMES,
    PART,
    STOCK,
    WHOLE,
    WRONG,
    generalized,
    wrong_answer,
)
from accel.bench.results import REASON
from accel.errors import logged

if TYPE_CHECKING:
    from rich.table import Table

AROUND = "attention runs stock"
NEW = 8
PRELOADED = ["torch", "transformers", "accel", "accel.llm.stages", "accel.bench.encoder_coverage", __name__]


def find_classes(names: Iterable[str]) -> dict[str, list[str]]:
    """Model classes with the model types that begin with these names, or all. Raises KeyError for unknown names."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: dict[str, list[str]] = {}
    for classes in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *encoder_kinds().values()):
        for kind, name in classes.items():
            found.setdefault(name, []).append(kind)
    types = [kind for kinds in found.values() for kind in kinds]
    asked = {name: [name] if name in types else [one for one in types if one.startswith(name)] for name in names}
    if unknown := [name for name, fitting in asked.items() if not fitting]:
        raise KeyError(*unknown)
    wanted = {kind for fitting in asked.values() for kind in fitting}
    return {name: kinds for name, kinds in found.items() if not asked or wanted & {*kinds}}


def run_coverage(
    classes: dict[str, list[str]], jobs: int, timeout: float, keep: Callable[[dict], object] = lambda row: None
) -> list[dict]:
    """A row for each class, in their order: class, types, outcome, reasons. keep: is given each as soon as it is there.

    timeout: seconds that one may take.
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    rows: dict[str, dict] = {}
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(one_row, processes, name, kinds, timeout) for name, kinds in classes.items()]
        for done in as_completed(running):
            row = done.result()
            rows[row["class"]] = row
            keep(row)
    return [rows[name] for name in classes]


def one_row(processes: Any, name: str, kinds: list[str], timeout: float) -> dict:
    """The row of one class, from a process of its own."""
    ours, theirs = processes.Pipe()
    process = processes.Process(target=tell, args=(theirs, name, kinds), daemon=True)
    process.start()
    theirs.close()
    row = {"class": name, "types": kinds, "outcome": ENDED, "stage": "starting"}
    try:
        while row["outcome"] == ENDED:
            if not ours.poll(timeout):
                row["reasons"] = [f"took more than {timeout:g} s {row['stage']}"]
                break
            row |= ours.recv()
    except EOFError:
        process.join()
        row["reasons"] = [f"exit code {process.exitcode} while {row['stage']}"]
    process.kill()
    process.join()
    if row["outcome"] != ENDED:
        del row["stage"]
    return row


def tell(connection: Connection, name: str, kinds: list[str]) -> None:
    """In a process of its own: sends the stages of `examine`, then its row. What the library prints is left out."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            for found in examine_encoder(name) if encodes(name) else examine(kinds):
                connection.send(found)
        except Exception as error:  # of whatever stage; the row tells it
            connection.send({"outcome": WRONG, "reasons": [logged(error)[:REASON]]})


def examine(kinds: list[str]) -> Iterator[dict]:
    """Stages of what is done with the class of these model types, then the outcome."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    import accel
    from accel.bench.llm.tiny import NotBuilt, build_tiny, tiny_prompt

    yield {"stage": "building"}
    try:
        model = build_tiny(MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kinds[0]]])
    except (NotBuilt, ImportError) as error:
        yield {"outcome": NOT_BUILT, "reasons": [str(error)]}
        return
    config = model.config.get_text_config(decoder=True)
    layers = getattr(config, "layer_types", None) or []
    weights = sum(one.numel() for one in model.parameters())
    yield {"model_type": model.config.model_type, "weights": weights, "layers": [str(one) for one in layers]}
    ids = tiny_prompt(model)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    yield {"stage": "running stock"}
    stock = answers_of(model, ids)
    yield {"stage": "optimizing"}
    try:
        accel.optimize(model, cpu="fuse")
    except (TypeError, ValueError) as error:
        yield {"outcome": STOCK, "reasons": [logged(error)[:REASON]]}
        return
    yield {"stage": "running optimized"}
    ours = answers_of(model, ids)
    report = accel.report(model)
    row = judged(report.sites)
    row["fallbacks"] = dict(Counter(reason for _, reason, _ in report.fallbacks))
    if left := {name: found for name, found in stock.items() if isinstance(found, str)}:
        row["not compared"] = left
    if differs := wrong_answer(stock, ours):
        row |= {"outcome": WRONG, "reasons": [differs], "fused": row["outcome"]}
    yield row


@torch.no_grad()
def answers_of(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """By call, logits of a prompt, tokens after it and after two padded prompts; or in words what was raised."""
    rows = torch.cat([ids, ids.roll(1, dims=1)])
    mask = torch.ones_like(rows)
    mask[1, : PROMPT // 3] = 0
    how = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    calls = {
        "tokens": lambda: model.generate(ids, **how)[:, -NEW:],
        "tokens after padding": lambda: model.generate(rows * mask, attention_mask=mask, **how)[:, -NEW:],
        "logits": lambda: model(ids).logits,
    }
    found: dict[str, Any] = {}
    for name, call in calls.items():
        torch.manual_seed(0)
        try:
            found[name] = call()
        except Exception as error:  # some classes cannot generate from ids alone
            found[name] = logged(error)[:REASON]
    return found


def judged(sites: list[tuple[str, str, str, str]]) -> dict[str, Any]:
    """Outcome and reasons by the rows of a report: sites are (path, rule, status, reason)."""
    whole = [(status, reason) for path, rule, status, reason in sites if rule == "language model" and not path]
    layers = Counter(status for _, rule, status, _ in sites if rule == "decoder layer")
    patched = Counter(rule for _, rule, status, _ in sites if status == "patched")
    reasons: dict[str, None] = {}
    for _, rule, status, reason in sites:
        if rule in ("decoder layer", "experts", "router") and reason and (status == "skipped" or "stock" in reason):
            reasons[generalized(reason)] = None
    fused = bool(whole) and whole[0][0] == "patched"
    if not fused:
        told = whole[0][1] if whole else "not taken for a causal language model that keeps a cache"
        reasons = {generalized(told): None}
    around = any(rule == "decoder layer" and AROUND in (reason or "") for _, rule, _, reason in sites)
    outcome = STOCK if not fused else PART if layers["skipped"] or around else WHOLE
    return {"outcome": outcome, "reasons": [*reasons], "patched": dict(patched)}


def summarized(rows: list[dict]) -> dict[str, Any]:
    """How many rows have each outcome, and each reason with the model types behind it, the most frequent first."""
    counts = Counter(row["outcome"] for row in rows)
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for reason in row.get("reasons", ()):
            reasons.setdefault(f"{row['outcome']}: {reason}", []).append(row.get("model_type", row["types"][0]))
    often = dict(sorted(reasons.items(), key=lambda item: -len(item[1])))
    return {"classes": len(rows), "counts": {name: counts[name] for name in OUTCOMES}, "reasons": often}


def coverage_tables(rows: list[dict]) -> "Iterator[Table]":
    """One line a class, then the reasons, then the counts."""
    from rich.table import Table

    for headings, lines in tables_of(rows).values():
        shown = Table(*headings)
        for line in lines:
            shown.add_row(*line)
        yield shown


def tables_of(rows: list[dict]) -> dict[str, tuple[tuple[str, ...], list[tuple]]]:
    """By title the headings and lines of each table."""
    found = summarized(rows)
    classes = [(named(row), row["outcome"], "; ".join(row.get("reasons", ()))[:REASON]) for row in rows]
    reasons = [(str(len(kinds)), reason[:REASON], ", ".join(kinds)) for reason, kinds in found["reasons"].items()]
    counts = [(str(count), outcome, MEANING[outcome]) for outcome, count in found["counts"].items()]
    return {
        "Classes": (("model types", "outcome", "reasons"), classes),
        "Reasons": (("classes", "outcome and reason", "model types"), reasons),
        "Counts": (("classes", "outcome", "meaning"), counts),
    }


def named(row: dict) -> str:
    """The model types of a row, with the class of an encoder, whose types are those of language models too."""
    types = ", ".join(row["types"])
    return f"{types} ({row['class']})" if encodes(row["class"]) else types


def encodes(name: str) -> bool:
    """Whether a class is one of encoders or encoder-decoders."""
    return any(name in classes.values() for classes in encoder_kinds().values())


def coverage_page(result: dict) -> str:
    """The result of the command as a page of Markdown, counts first."""
    versions = ", ".join(f"{name} {result['machine'][name]}" for name in ("transformers", "torch"))
    told = {"classes": result["classes"], "share": share_of(result["rows"]), "versions": versions}
    lines = ["# Coverage", "", ABOUT.format(**told)]
    for title, (headings, rows) in reversed(tables_of(result["rows"]).items()):
        lines += ["", f"## {title}", "", f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


ABOUT = """Every class of language model, encoder and encoder-decoder that transformers lists ({classes}), tiny, random
weights, in fp32 on a CPU: fused whole, in part, or stock. Each language model generates 8 tokens stock and optimized,
from a prompt longer than its window, and from two of which one is padded; an encoder reads such texts, padded on either
side, or images or sound. A class whose tokens or hidden states differ is wrong. {share}.

`accel coverage --out benchmarks/results --page docs/measurements/coverage.md` writes this page, which nobody edits by
hand. Written with {versions}."""
