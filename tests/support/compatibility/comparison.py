"""One model, stock and optimized and restored, through the same calls; what became of it is a row of the table."""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

import accel

# How far a tiny model in fp32 may be from stock, relative root mean square: sums in another order, over a few layers.
LIMIT = 3e-5
WHOLE = "language model"
BLOCKS = {
    "resnet block",
    "video resnet block",
    "diffusion transformer block",
    "upward block",
    "transformer stack",
    "transformer block",
    "attention",
    "resampling",
}
ON_A_GPU = {"CUDA graph"}  # patched, and waiting for a GPU: on a CPU the forward inside is stock


@dataclass(frozen=True)
class Row:
    """model: a model_type, or a class. outcome: "fused" (a language model as a whole, or blocks of another), "parts"
    (norms and other single layers), "graph" (stock code, as a CUDA graph on a GPU), "stock", "not built" (stock itself
    runs no call here), or what may not be: "raises", "differs". fast: the rules that were applied. why: what was left
    out or ran stock, with its reason."""

    model: str
    kind: str
    outcome: str
    fast: str = ""
    why: str = ""

    @property
    def wrong(self) -> bool:
        return self.outcome in ("raises", "differs")


def compare(name: str, model: torch.nn.Module, calls: dict[str, Callable], leftovers: Callable, **options) -> Row:
    """calls: by name, functions of a model that give a tree of tensors; one that stock refuses is left out.
    leftovers: the list of differences between the attributes of two models. options: of `accel.optimize`."""
    kind, stock = type(model).__name__, copy.deepcopy(model)
    wanted, refused = {}, {}
    with torch.no_grad():
        for call, function in calls.items():
            try:
                runs = [seeded(function, stock) for _ in range(2)]
            except Exception as error:
                refused[call] = told(error)
                continue
            if same(*runs):
                wanted[call] = runs[0]
        if not wanted:
            return Row(name, kind, "not built", why=next(iter(refused.values()), "no call of it is repeatable"))
        step, problems = "optimize", []
        try:
            accel.optimize(model, **options)
            for step, before in (*wanted.items(), *wanted.items()):  # the first call of a block is stock's, recorded
                if (error := apart(seeded(calls[step], model), before)) > LIMIT:
                    problems.append(f"{step}: off by {error:.1e}")
            report = accel.report(model)
            step = "restore"
            accel.restore(model)
            problems += [
                f"{step}: not stock's bits after restore"
                for step, before in wanted.items()
                if not same(seeded(calls[step], model), before)
            ]
        except Exception as error:
            return Row(name, kind, "raises", why=f"{step}: {told(error)}")
    problems += [f"left behind: {left}" for left in leftovers(model, stock)]
    if problems:
        return Row(name, kind, "differs", why="; ".join(problems[:3]))
    return described(name, kind, report)


def described(name: str, kind: str, report: accel.Report) -> Row:
    stock = {path for path, *_ in report.fallbacks}  # a block that ran stock is none that is fused
    patched = [(path, rule) for path, rule, status, _ in report.sites if status == "patched"]
    rules = {rule for path, rule in patched if rule not in BLOCKS or path not in stock}
    left = [(path, rule, reason) for path, rule, status, reason in report.sites if status == "skipped"]
    language = any(rule == WHOLE for _, rule, *_ in report.sites)
    if rules & ({WHOLE} if language else BLOCKS):
        outcome = "fused"
    elif rules - ON_A_GPU:
        outcome = "parts"
    else:
        outcome = "graph" if rules else "stock"
    if language:  # its layers and norms are left out because it is
        left = [row for row in left if row[1] == WHOLE] or left
    reasons = [reason if rule == WHOLE else f"{rule}: {reason}" for _, rule, reason in left]
    reasons += [f"calls of {path or 'the model'} ran stock: {reason}" for path, reason, _ in report.fallbacks]
    if not reasons and outcome != "fused":
        reasons = ["no rule knows what it is made of"]
    return Row(name, kind, outcome, ", ".join(sorted(rules)), "; ".join(sorted(set(map(plain, reasons)))))


def plain(text: str) -> str:
    """A reason without what depends on the machine, in one line."""
    text = re.sub(r"off by \d[\d.e+-]*", "off by …", " ".join(text.replace("|", "/").split()))
    text = re.sub(r"\.\d+\b", ".*", text)
    return text if len(text) <= 150 else text[:149] + "…"


def told(error: Exception) -> str:
    return plain(f"{type(error).__name__}: {error}")


def seeded(function: Callable, model: torch.nn.Module):
    torch.manual_seed(0)
    return function(model)


def tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def same(got, wanted) -> bool:
    """Bit for bit."""
    pairs = list(zip(tensors(got), tensors(wanted), strict=False))
    shapes = len(tensors(got)) == len(tensors(wanted)) and all(g.shape == w.shape for g, w in pairs)
    return shapes and all(torch.equal(g.nan_to_num(7.0), w.nan_to_num(7.0)) for g, w in pairs)


def apart(got, wanted) -> float:
    """The largest distance of two tensors, relative to the second; inf where they are not of one form."""
    got, wanted = tensors(got), tensors(wanted)
    if [(g.shape, g.dtype) for g in got] != [(w.shape, w.dtype) for w in wanted]:
        return float("inf")
    return max(map(distance, got, wanted), default=0.0)


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    finite = wanted.isfinite()
    if not torch.equal(finite, got.isfinite()):
        return float("inf")
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return 0.0 if torch.equal(got, wanted) else float("inf")
    got, wanted = (tensor[finite].to(torch.complex128) for tensor in (got, wanted))
    return float((got - wanted).norm() / wanted.norm().clamp_min(1e-20)) if wanted.numel() else 0.0
