"""Quantized language models of other packages beside accel's, in one process: generate() as a user calls it.

    python benchmarks/peers.py OUT.json [--model llama-8b] [--batches 1 8 32] [--compile SECONDS]

Decode steps and a prompt of 2048 tokens, random weights; in every variant the linear layers inside the decoder layers
are quantized, the head in those of that name alone. All take turns. ready_s: quantizing and the first call beyond a
later one, in the order of the list and in one process, so that a variant may find kernels that one before it compiled.
Memory is a variant's own. torchao documents a static cache under torch.compile for speed: --compile allows so many
seconds for each of these and for stock, batch 1 only, with the compiler's settings as torchao makes them. A package
that is not installed is told under `missing`, and what fails under `failed`. All is written as soon as it is known,
so that an interrupted run leaves what it has.
"""

import argparse
import copy
import json
import logging
import signal
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

import accel
from accel.bench.compiled import fresh_inductor_cache
from accel.bench.llm import cases
from accel.bench.llm.interleaved import TimedCase, Variant, interleaved
from accel.bench.llm.models import build, prompt
from accel.bench.llm.traffic import Traffic, copy_bandwidth
from accel.bench.machine import commit, machine, now
from accel.bench.memory import release
from accel.bench.timing import Clock, seconds
from accel.verification.agreement import distributions

PROMPT, PREFILL = 512, 2048
GROUP = 128
NEW, LATER = 16, 3  # tokens of a first call, and the calls after it
KL_PROMPT = (2, 256)


def optimized(**options) -> Callable[[nn.Module], None]:
    return lambda model: accel.optimize(model, **options) and None


def torchao(bits: int) -> Callable[[nn.Module], None]:
    def make(model: nn.Module) -> None:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

        # The default packing needs a package of its own (mslk); this one's kernel (tinygemm) is in torch.
        four = {"group_size": GROUP, "int4_packing_format": "tile_packed_to_4d"}
        quantize_(model.model.layers, Int8WeightOnlyConfig() if bits == 8 else Int4WeightOnlyConfig(**four))

    return make


def bitsandbytes(bits: int) -> Callable[[nn.Module], None]:
    """As transformers' BitsAndBytesConfig makes it: LLM.int8 with its usual threshold, or nf4 computing in bf16."""

    def make(model: nn.Module) -> None:
        from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit

        # It warns of every product that bf16 is cast to fp16, which would be timed.
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        eight, four = {"has_fp16_weights": False}, {"quant_type": "nf4", "compress_statistics": False}
        for parent in list(model.model.layers.modules()):
            for name, old in parent.named_children():
                if type(old) is not nn.Linear:
                    continue
                sizes, device = (old.in_features, old.out_features, old.bias is not None), old.weight.device
                if bits == 8:
                    new = Linear8bitLt(*sizes, **eight, threshold=6.0, device="meta")
                    # It is rounded on its way from the CPU only; transformers takes it there too.
                    new.weight = Int8Params(old.weight.data.cpu(), requires_grad=False, **eight).to(device)
                else:
                    new = Linear4bit(*sizes, compute_dtype=old.weight.dtype, **four, device="meta")
                    new.weight = Params4bit(old.weight.data, module=new, **four).to(device)
                new.bias = old.bias
                setattr(parent, name, new.eval())

    return make


# Name: how a copy of the stock model becomes it, the package it needs, and whether it is timed compiled too.
PEERS: dict[str, tuple[Callable[[nn.Module], None], str | None, bool]] = {
    "stock": (lambda model: None, None, True),
    "accel": (optimized(), None, False),
    "accel int8": (optimized(weights="int8", keep_original=False), None, False),
    "accel int4": (optimized(weights="int4", keep_original=False), None, False),
    "accel int8-head": (optimized(weights="int8-head", keep_original=False), None, False),
    "accel int4-head": (optimized(weights="int4-head", keep_original=False), None, False),
    "accel int8 x int8": (optimized(weights="int8", activations="int8", keep_original=False), None, False),
    "accel int8 x int8-outliers": (
        optimized(weights="int8", activations="int8-outliers", keep_original=False),
        None,
        False,
    ),
    "accel fp8 x fp8": (optimized(weights="fp8", activations="fp8", keep_original=False), None, False),
    "torchao int8": (torchao(8), "torchao", True),
    "torchao int4": (torchao(4), "torchao", True),
    "bitsandbytes int8": (bitsandbytes(8), "bitsandbytes", False),
    "bitsandbytes nf4": (bitsandbytes(4), "bitsandbytes", False),
}


PLAIN = ("stock", "accel")


def _quantized(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and not (type(module) is nn.Linear and type(module.weight) is nn.Parameter)


def version(package: str) -> str | None:
    """None where it cannot be imported, whatever the reason."""
    try:
        __import__(package)
        return metadata.version(package)
    except Exception as error:
        print(f"{package}: {type(error).__name__}: {error}", flush=True)
        return None


def allocated(device: torch.device, peak: bool = False) -> float:
    """MiB; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    return (torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated)(device) / 2**20


@torch.no_grad()
def made(name: str, stock: nn.Module, device: torch.device, batches: tuple[int, ...]) -> tuple[Variant, dict]:
    """The variant, and what it takes to have it. The MiB are what it needs beside everything that was there before."""
    release(device)
    before = allocated(device)
    if name == "stock":
        model, before = stock, before - sum(p.nbytes for p in stock.parameters()) / 2**20
    else:
        model = copy.deepcopy(stock)
    make_s = seconds(lambda: PEERS[name][0](model), device)
    if name not in PLAIN and not any(map(_quantized, model.model.layers.modules())):
        raise ValueError("no linear layer was quantized")
    release(device)
    own, inputs = allocated(device) - before, prompt(stock, 1, PROMPT)
    variant = Variant(name, model)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    first, *later = (seconds(lambda: variant.generate(inputs, NEW), device) for _ in range(1 + LATER))
    peaks = {}
    for rows in batches:
        some = prompt(stock, rows, PROMPT)
        variant.generate(some, NEW)
        peaks[str(rows)] = round(allocated(device, peak=True) - before, 1)
    steady = statistics.median(later)
    small = prompt(stock, *KL_PROMPT)
    kl, _, top1 = distributions(*(one(**small).logits.flatten(0, 1) for one in (stock, model)))
    return variant, {
        "make_s": round(make_s, 2),
        "first_call_s": round(first, 3),
        "steady_call_s": round(steady, 4),
        "ready_s": round(max(0.0, make_s + first - steady), 2),
        "mb": round(own, 1),
        "peak_mb_by_batch": peaks,
        "kl": kl,
        "top1": top1,
    }


@contextmanager
def within(limit: float) -> Iterator[None]:
    """Raises TimeoutError inside after so many seconds."""

    def over(*_):
        raise TimeoutError(f"not done within {limit:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def compiled(work: cases.Work, variant: Variant, limit: float, fail: Callable[[str, Exception], None]) -> dict:
    """Figures of one row with the static cache, which generate() compiles; {} where that failed."""
    inputs, began = prompt(work.stock, 1, PROMPT), {}

    def prepare(variant: Variant):
        # Most tokens first: the cache made for them serves the calls that write fewer.
        began["compile_s"] = round(seconds(lambda: variant.generate(inputs, work.many), work.device), 2)
        return lambda: work.steps(variant, inputs)

    def figures(median: dict, variant: Variant) -> dict:
        return work.rate(1, PROMPT, median, variant) | began

    try:
        with within(limit), fresh_inductor_cache():
            found = interleaved(TimedCase("compiled", {}, prepare, figures), [variant], work.device, 0.0, fail)
    except TimeoutError as error:  # raised where no variant was at work
        fail(variant.name, error)
        found = {}
    torch.compiler.reset()
    return found


@torch.no_grad()
def run(given: argparse.Namespace) -> dict:
    """The result, which lies in `given.out` as far as it is known."""
    given.out.parent.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock, dtype = Clock(given.seconds), torch.bfloat16 if device.type == "cuda" else torch.float32
    packages = {package: version(package) for package in ("torchao", "bitsandbytes")}
    stock = build(given.model, device, dtype)
    result = {
        "case": f"peers-{given.model}",
        "about": f"generate() of {given.model}, random weights; the linear layers inside the decoder layers quantized",
        "date": now(),
        "commit": commit(),
        "machine": machine(device) | packages,
        "dtype": str(dtype).removeprefix("torch."),
        "sizes": {"prompt": PROMPT, "new tokens": given.new_tokens, "int4 group": GROUP},
        "missing": sorted(name for name, version in packages.items() if version is None),
        "variants": {},
        "decode": [],
        "prefill": [],
        "compiled": {},
        "failed": [],
    }

    def save() -> None:
        result["took_s"] = round(given.seconds - clock.left(), 1)
        given.out.write_text(json.dumps(result, indent=2) + "\n")

    def fail(part: str) -> Callable[[str, Exception], None]:
        def told(name: str, error: Exception) -> None:
            lines = str(error).strip().splitlines() or [""]
            row = {"part": part, "variant": name, "reason": f"{type(error).__name__}: {lines[0]}"[:300]}
            result["failed"].append(row)
            print(row, flush=True)

        return told

    variants = []
    for name in given.peers:
        if PEERS[name][1] in result["missing"]:
            continue
        try:
            variant, told = made(name, stock, device, given.batches)
        except Exception as error:  # one package must not cost the others' figures
            fail("making")(name, error)
            continue
        result["variants"][name] = told
        saved = result["variants"].get("stock", told)["mb"] - told["mb"]
        variants.append(replace(variant, saved=max(0, int(saved * 2**20))))
        print(name, told, f"{clock.left():.0f} s left", flush=True)
        save()
    sizes = (tuple(given.batches), (PROMPT,), given.new_tokens, 1)
    work = cases.Work(stock, Traffic.of(stock), copy_bandwidth(device), device, *sizes)
    result["copy_bandwidth_gb_s"] = round(work.bandwidth / 1e9, 1)
    prefill = [case for case in cases.prefill(work) if case.about["tokens"] == given.prefill]
    if not prefill:
        fail("prefill")("", ValueError(f"{given.prefill} tokens are more than {given.model} has positions for"))
    for case in (*cases.decode(work), *prefill):
        if clock.left() <= 0:
            fail(case.part)(case.name, TimeoutError(f"{given.seconds:g} seconds were over"))
            continue
        found = interleaved(case, variants, device, given.seconds / 40, fail(f"{case.part}, {case.name}"))
        result[case.part].append(case.about | found)
        main = "ms" if case.part == "prefill" else "ms_step"
        print(case.part, case.name, {name: row[main] for name, row in found.items()}, flush=True)
        save()
    for variant in variants if given.compile else ():
        if PEERS[variant.name][2] and clock.left() > 0:
            static = replace(variant, options={"cache_implementation": "static"})
            result["compiled"] |= compiled(work, static, min(given.compile, clock.left()), fail("compiled"))
            print("compiled", result["compiled"].get(variant.name), flush=True)
            save()
    save()
    return result


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="llama-8b", help="a name of `accel bench llm`")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--prefill", type=int, default=PREFILL, choices=cases.PROMPTS, help="tokens of the prompt")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--compile", type=float, default=0.0, help="seconds for each variant that is timed compiled")
    parser.add_argument("--seconds", type=float, default=400.0, help="after so many nothing new is begun")
    return parser.parse_args(given)


if __name__ == "__main__":
    run(arguments())
