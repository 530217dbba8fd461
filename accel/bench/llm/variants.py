"""Models that take turns: stock, accel, and accel with quantized weights or caches; what each costs and loses."""

import copy
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from accel_kernels import Quantized

import accel
from accel.bench.llm.models import prompt
from accel.bench.timing import seconds
from accel.quantization.activations import weight_dtype_of
from accel.quantization.experts import QuantizedExperts
from accel.verification.agreement import distributions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPT = (2, 256)  # rows and tokens that the loss is told for
TOKEN = re.compile(r"(\d+) bytes a token instead of (\d+)")  # as the report says it


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


def lossy_options(
    weights: tuple[str, ...], kv_cache: tuple[str, ...], activations: tuple[str, ...] = ()
) -> Iterator[tuple[str, dict[str, str]]]:
    """Name and options of every variant: each by itself, then weights together with each kind of cache.

    activations: each with weights of the same kind.
    """
    linears = {scheme: {"weights": scheme} for scheme in weights}
    for one in activations:
        weight_dtype = weight_dtype_of(one)
        linears[f"{weight_dtype} x {one}"] = {"weights": weight_dtype, "activations": one}
    yield from linears.items()
    for kind in kv_cache:
        yield f"kv {kind}", {"kv_cache": kind}
    for name, options in linears.items():
        for kind in kv_cache:
            yield f"{name}, kv {kind}", options | {"kv_cache": kind}


@torch.no_grad()
def lossy_variant(
    stock: "PreTrainedModel", name: str, options: dict[str, Any], device: torch.device
) -> tuple[Variant, dict]:
    """A copy of the stock model under accel.optimize with these options, and its row of the result.

    quantize_s: of that call, kernels compiled for it included. kl, top1: against stock, on random tokens. mb: MiB of
    the quantized weights alone, with embeddings that an output head shared its weight with. token_bytes: what a token
    takes in a rounded cache. Raises ValueError where nothing was quantized.
    """
    model = copy.deepcopy(stock)
    keep: dict[str, Any] = {"keep_original": False} if "weights" in options else {}
    taken = seconds(lambda: accel.optimize(model, **options, **keep), device)
    report = accel.report(model)
    inputs = prompt(stock, *PROMPT)
    kl, _, top1 = distributions(*(one(**inputs).logits.flatten(0, 1) for one in (stock, model)))
    told = {"quantize_s": round(taken, 3), "kl": kl, "top1": top1}
    saved, experts, kept = 0, 0, 1.0
    if "weights" in options:
        rows = report.weights
        if not rows:
            raise ValueError(f"weights={options['weights']!r}: no linear layer was quantized")
        before, after = (sum(row[key] for row in rows) for key in ("bytes_before", "bytes_after"))
        for row in rows:
            numbers, mixture = _numbers(model, row["path"])
            less = row["bytes_before"] - numbers.nbytes  # of what is read
            saved, experts = (saved, experts + less) if mixture else (saved + less, experts)
        told |= {"mb": round(after / 2**20, 3), "mb_before": round(before / 2**20, 3)}
        told["sqnr_db"] = round(statistics.mean(row["sqnr_db"] for row in rows), 2)
    if "kv_cache" in options:
        notes = [TOKEN.search(str(site)) for site in report.sites]
        now, before = next((map(int, note.groups()) for note in notes if note), (1, 1))
        if now >= before:
            raise ValueError(f"kv_cache={options['kv_cache']!r}: no keys or values are rounded")
        kept = now / before
        told |= {"token_bytes": now, "token_bytes_before": before}
    return Variant(f"accel {name}", model, saved=saved, saved_experts=experts, kept=kept), told


def _numbers(model: "PreTrainedModel", path: str) -> tuple[Quantized, bool]:
    """The weight of a row of `Report.weights`, and whether it is a stack of experts."""
    owner, _, name = path.rpartition(".")
    if isinstance(module := model.get_submodule(owner), QuantizedExperts):
        return module.stack(name), True
    return model.get_submodule(path).quantized, False
