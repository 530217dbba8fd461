"""Quantized language models of other packages beside accel's, in one process: generate() as a user calls it.

Decode steps and a prompt of 2048 tokens, random weights; in every variant the linear layers inside the decoder layers
are quantized, the head in those of that name alone. All take turns. ready_s: quantizing and the first call beyond a
later one, in the order of the list and in one process, so that a variant may find kernels that one before it compiled.
Memory is a variant's own. A package that is not installed is told under `missing`, and what fails under `failed`.
"""

import copy
import logging
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

import accel
from accel.bench.llm import cases
from accel.bench.llm.cases import interleaved
from accel.bench.llm.models import build, prompt
from accel.bench.llm.traffic import Traffic, copy_bandwidth
from accel.bench.llm.variants import Variant
from accel.bench.memory import release
from accel.bench.timing import seconds as taken
from accel.verification.agreement import distributions
from benchmarks.study import DEVICE, HALF, Study, numbers, words

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


# Name: how a copy of the stock model becomes it, and the package it needs.
OURS = {
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
    "int8-head": {"weights": "int8-head"},
    "int4-head": {"weights": "int4-head"},
    "int8 x int8": {"weights": "int8", "activations": "int8"},
    "int8 x int8-outliers": {"weights": "int8", "activations": "int8-outliers"},
    "fp8 x fp8": {"weights": "fp8", "activations": "fp8"},
}
PEERS: dict[str, tuple[Callable[[nn.Module], None], str | None]] = {
    "stock": (lambda model: None, None),
    "accel": (optimized(), None),
    **{f"accel {name}": (optimized(keep_original=False, **options), None) for name, options in OURS.items()},
    **{f"torchao int{bits}": (torchao(bits), "torchao") for bits in (8, 4)},
    "bitsandbytes int8": (bitsandbytes(8), "bitsandbytes"),
    "bitsandbytes nf4": (bitsandbytes(4), "bitsandbytes"),
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


def allocated(peak: bool = False) -> float:
    """MiB; 0 on a CPU."""
    if DEVICE.type != "cuda":
        return 0.0
    return (torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated)(DEVICE) / 2**20


def made(name: str, stock: nn.Module, batches: list[int]) -> tuple[Variant, dict]:
    """The variant, and what it takes to have it. The MiB are what it needs beside everything that was there before."""
    release(DEVICE)
    before = allocated()
    if name == "stock":
        model, before = stock, before - sum(p.nbytes for p in stock.parameters()) / 2**20
    else:
        model = copy.deepcopy(stock)
    make_s = taken(lambda: PEERS[name][0](model), DEVICE)
    if name not in PLAIN and not any(map(_quantized, model.model.layers.modules())):
        raise ValueError("no linear layer was quantized")
    release(DEVICE)
    own, inputs = allocated() - before, prompt(stock, 1, PROMPT)
    variant = Variant(name, model)
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats(DEVICE)
    first, *later = (taken(lambda: variant.generate(inputs, NEW), DEVICE) for _ in range(1 + LATER))
    peaks = {}
    for rows in batches:
        variant.generate(prompt(stock, rows, PROMPT), NEW)
        peaks[str(rows)] = round(allocated(peak=True) - before, 1)
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


def variants_of(record: Study, stock: nn.Module, names: list[str], batches: list[int]) -> list[Variant]:
    """Those that can be made; one package must not cost the others' figures."""
    variants: list[Variant] = []
    for name in names:
        if PEERS[name][1] not in record.about["missing"]:
            with record.attempt(part="making", variant=name):
                variant, told = made(name, stock, batches)
                record.body["variants"][name] = told
                saved = record.body["variants"].get("stock", told)["mb"] - told["mb"]
                variants.append(replace(variant, saved=max(0, int(saved * 2**20))))
                record.show(name, told, f"{record.clock.left():.0f} s left")
            record.save()
    return variants


def main(
    out: Path, model: str = "llama-8b", peers: str = ",".join(PEERS), batches: str = "1,8,32", prefill: int = PREFILL,
    new_tokens: int = 32, seconds: float = 400.0,
) -> dict:  # fmt: skip
    """model: of `accel bench llm`. prefill: tokens of the prompt. seconds: after so many nothing new is begun."""
    packages = {package: version(package) for package in ("torchao", "bitsandbytes")}
    about = f"generate() of {model}, random weights; the linear layers inside the decoder layers quantized"
    record = Study(f"peers-{model}", out, about, seconds, variants={}, decode=[], prefill=[])
    record.about["machine"] |= packages
    record.about["missing"] = sorted(name for name, version in packages.items() if version is None)
    stock, rows = build(model, DEVICE, HALF), numbers(batches)
    variants = variants_of(record, stock, words(peers), rows)
    work = cases.Work(stock, Traffic.of(stock), copy_bandwidth(DEVICE), DEVICE, tuple(rows), (PROMPT,), new_tokens, 1)
    record.about["copy_bandwidth_gb_s"] = round(work.bandwidth / 1e9, 1)
    prompts = [case for case in cases.prefill(work) if case.about["tokens"] == prefill]
    for case in (*cases.decode(work), *prompts):
        if record.in_time(part=case.part, case=case.name):
            found = interleaved(
                case, variants, DEVICE, seconds / 40, partial(record.fail, part=case.part, case=case.name)
            )
            record.add(case.part, case.about | found)
    record.save()
    return record.result
