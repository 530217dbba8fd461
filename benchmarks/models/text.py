"""Language models in settings beside one another: stock, accel, other packages' quantized ones, spread over cards.

In one process, random weights: generate() as a user calls it, decode steps and a prompt of 2048 tokens; `text-batches`:
generate_batch. All settings take turns. In each the linear layers inside the decoder layers are quantized, the head in
those of that name alone; "2 cards" is a model spread by accelerate's hooks. ready_s: quantizing and the first call
beyond a later one, in the order of the list, so that a setting may find kernels that one before it compiled. Memory is
a setting's own, on the first card. A package that is not installed is told under `missing`, what fails under `failed`.
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
from accel.bench.llm import batch, cases
from accel.bench.llm.models import build, prompt, spread
from accel.bench.llm.traffic import Traffic, copy_bandwidth
from accel.bench.llm.variants import Variant
from accel.bench.llm.workloads import Workload
from accel.bench.memory import allocated_bytes
from accel.bench.timing import seconds as taken
from accel.verification.agreement import distributions
from benchmarks.study import DEVICE, HALF, Study, numbers, words

PROMPT, PREFILL = 512, 2048
GROUP = 128
NEW, LATER = 16, 3  # tokens of a first call, and the calls after it
KL_PROMPT = (2, 256)

Make = Callable[[nn.Module], None]


def optimized(**options) -> Make:
    return lambda model: accel.optimize(model, **options) and None


def torchao(bits: int) -> Make:
    def make(model: nn.Module) -> None:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

        # The default packing needs a package of its own (mslk); this one's kernel (tinygemm) is in torch.
        four = {"group_size": GROUP, "int4_packing_format": "tile_packed_to_4d"}
        quantize_(model.model.layers, Int8WeightOnlyConfig() if bits == 8 else Int4WeightOnlyConfig(**four))

    return make


def bitsandbytes(bits: int) -> Make:
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


def spread_over(cards: int, then: Make) -> Make:
    def make(model: nn.Module) -> None:
        then(spread(model, cards))

    return make


OURS = {
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
    "int8-head": {"weights": "int8-head"},
    "int4-head": {"weights": "int4-head"},
    "int8 x int8": {"weights": "int8", "activations": "int8"},
    "int8 x int8-outliers": {"weights": "int8", "activations": "int8-outliers"},
    "fp8 x fp8": {"weights": "fp8", "activations": "fp8"},
}
# Name: how a copy of the stock model becomes it.
PLAIN: dict[str, Make] = {"stock": lambda model: None, "accel": optimized()}
PLAIN |= {f"{cards} cards, {name}": spread_over(cards, make) for cards in (2, 4) for name, make in PLAIN.items()}
QUANTIZED: dict[str, Make] = {f"accel {name}": optimized(keep_original=False, **one) for name, one in OURS.items()}
QUANTIZED |= {f"torchao int{bits}": torchao(bits) for bits in (8, 4)}
QUANTIZED |= {"bitsandbytes int8": bitsandbytes(8), "bitsandbytes nf4": bitsandbytes(4)}
SETTINGS = PLAIN | QUANTIZED
PEERS = ("stock", "accel", *QUANTIZED)


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


def made(name: str, stock: nn.Module, batches: list[int]) -> tuple[Variant, dict]:
    """The setting, and what it takes to have it. The MiB are what it needs beside everything that was there before."""
    before = allocated_bytes(DEVICE)
    if name == "stock":
        model, before = stock, before - sum(p.nbytes for p in stock.parameters())
    else:
        model = copy.deepcopy(stock)
    make_s = taken(lambda: SETTINGS[name](model), DEVICE)
    if name in QUANTIZED and not any(map(_quantized, model.model.layers.modules())):
        raise ValueError("no linear layer was quantized")
    own, inputs = allocated_bytes(DEVICE) - before, prompt(stock, 1, PROMPT)
    variant = Variant(name, model)
    on_gpu = DEVICE.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(DEVICE)
    first, *later = (taken(lambda: variant.generate(inputs, NEW), DEVICE) for _ in range(1 + LATER))
    peaks = {}
    for rows in batches:
        variant.generate(prompt(stock, rows, PROMPT), NEW)
        peak = torch.cuda.max_memory_allocated(DEVICE) - before if on_gpu else 0
        peaks[str(rows)] = round(peak / 2**20, 1)
    steady = statistics.median(later)
    small = prompt(stock, *KL_PROMPT)
    kl, _, top1 = distributions(*(one(**small).logits.flatten(0, 1) for one in (stock, model)))
    return variant, {
        "make_s": round(make_s, 2),
        "first_call_s": round(first, 3),
        "steady_call_s": round(steady, 4),
        "ready_s": round(max(0.0, make_s + first - steady), 2),
        "mb": round(own / 2**20, 1),
        "peak_mb_by_batch": peaks,
        "kl": kl,
        "top1": top1,
    }


def variants_of(record: Study, stock: nn.Module, names: list[str], batches: list[int]) -> list[Variant]:
    """Those that can be made, told in `variants` of the record; one package must not cost the others' figures."""
    packages = {package: version(package) for package in ("torchao", "bitsandbytes")}
    record.about["machine"] |= packages
    record.about["missing"] = missing = sorted(name for name, version in packages.items() if version is None)
    variants: list[Variant] = []
    for name in (name for name in names if name.partition(" ")[0] not in missing):
        with record.attempt(part="making", variant=name):
            variant, told = made(name, stock, batches)
            record.body["variants"][name] = told
            saved = record.body["variants"].get("stock", told)["mb"] - told["mb"]
            variants.append(replace(variant, saved=max(0, int(saved * 2**20)) if name in QUANTIZED else 0))
            record.show(name, told, f"{record.clock.left():.0f} s left")
        record.save()
    return variants


def main(
    out: Path, model: str = "llama-8b", settings: str = ";".join(PEERS), batches: str = "1,8,32",
    prefill: int = PREFILL, new_tokens: int = 32, seconds: float = 400.0,
) -> dict:  # fmt: skip
    """model: of `accel bench llm`. settings: with semicolons between. prefill: tokens of the prompt. seconds: after so
    many nothing new is begun.
    """
    about = f"generate() of {model}, random weights; the linear layers inside the decoder layers quantized"
    record = Study(f"peers-{model}", out, about, seconds, variants={}, decode=[], prefill=[])
    stock, rows = build(model, DEVICE, HALF), numbers(batches)
    variants = variants_of(record, stock, words(settings, ";"), rows)
    work = cases.Work(stock, Traffic.of(stock), copy_bandwidth(DEVICE), DEVICE, tuple(rows), (PROMPT,), new_tokens)
    record.about["copy_bandwidth_gb_s"] = round(work.bandwidth / 1e9, 1)
    prompts = [case for case in cases.prefill(work) if case.about["tokens"] == prefill]
    for case in (*cases.decode(work), *prompts):
        if record.in_time(part=case.part, case=case.name):
            fail = partial(record.fail, part=case.part, case=case.name)
            record.add(case.part, case.about | cases.interleaved(case, variants, DEVICE, seconds / 40, fail))
    record.save()
    return record.result


def batches(
    out: Path, model: str = "llama-8b", settings: str = "accel;2 cards, accel", requests: str = "64,128,256",
    tokens: int = 512, new: int = 128,
) -> dict:  # fmt: skip
    """Tokens a second of generate_batch, after each token of a small batch was compared with stock's logits.

    settings: with semicolons between. tokens: of a prompt. new: of an answer.
    """
    record = Study(f"batches-{model}", out, f"generate_batch of {model}, random weights", variants={}, rows=[])
    stock = build(model, DEVICE, HALF)
    variants = variants_of(record, stock, words(settings, ";"), [])
    for variant in variants:
        record.body["variants"][variant.name] |= batch.checked_tokens(variant.model, stock)
    for count in numbers(requests):
        workload, row = Workload("even", count, tokens, tokens, new), {"requests": count}
        for variant in variants:
            with record.attempt(variant=variant.name, **row):
                row[variant.name] = batch.timed(workload, variant.model, DEVICE)
        record.add("rows", row)
    for variant in variants:
        report = accel.report(variant.model)
        record.body["variants"][variant.name] |= {"fallbacks": report.fallbacks, "batching": report.batching}
    record.save()
    return record.result
