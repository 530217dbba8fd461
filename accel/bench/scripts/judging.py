"""Whether what accel gives is what stock gives: numbers by their rounding, tokens up to near-ties."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from accel.bench.results import WrongResult
from accel.comparison import first_differences, tensor_leaves
from accel.in_flight import listening
from accel.planning.targets import models_in
from accel.tolerances import LOGITS, SEEN, UNITS, bound
from accel.verification.metrics import compare
from accel.verification.noise import with_noise


def dtype_of(obj: Any) -> torch.dtype:
    """The dtype that the object computes in: that of most of its weights that are not packed."""
    counts: dict[torch.dtype, int] = {}
    for model in models_in(obj).values():
        for weight in model.parameters():
            if weight.is_floating_point() and weight.element_size() > 1:
                counts[weight.dtype] = counts.get(weight.dtype, 0) + weight.numel()
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)


def judge_outputs(stock: Any, ours: Any, dtype: torch.dtype, obj: Any, again: Callable[[], Any]) -> dict:
    """Figures of the difference. Raises WrongResult where rounding does not explain it.

    obj: the stock object; again(): its call once more, for tokens one that chooses each of them greedily.
    """
    if isinstance(stock, torch.Tensor) and not stock.is_floating_point():  # tokens
        return _of_tokens(stock, ours, dtype, obj, again)
    if [leaf.shape for leaf in tensor_leaves(stock)] != [leaf.shape for leaf in tensor_leaves(ours)]:
        raise WrongResult("the outputs differ in shape from stock's")
    quality = compare(stock, ours)
    if quality.stock_finite and not quality.finite:
        raise WrongResult("NaN or Inf where stock has none")
    unit = UNITS * torch.finfo(dtype).eps / 2
    error, allowed = quality.relative_rms, max(unit, SEEN)
    if error > allowed and obj is not None:
        # Of a loop: as far as its models' outputs may be from stock moves stock itself.
        with with_noise((model, unit) for model in models_in(obj).values()):
            allowed = max(allowed, compare(stock, again()).relative_rms)
    if quality.stock_finite and not error <= allowed:
        raise WrongResult(f"relative RMS {error:.2g} from stock, more than the {allowed:.2g} that rounding explains")
    return {"relative_rms": error, "allowed": allowed, "stock_finite": quality.stock_finite}


def _of_tokens(
    stock: torch.Tensor, ours: torch.Tensor, dtype: torch.dtype, obj: Any, again: Callable[[], torch.Tensor]
) -> dict:
    """Tokens that differ are right where stock's logits hardly preferred its own; only the first of each row counts."""
    if stock.shape != ours.shape:
        raise WrongResult(f"{tuple(ours.shape)} tokens, stock has {tuple(stock.shape)}")
    told = {"tokens": stock.numel(), "equal": int((stock == ours).sum())}
    if told["equal"] == told["tokens"]:
        return told
    with _logits(obj) as steps:
        greedy = again()
    rows = len(greedy)
    chosen = torch.stack([step[:rows].float() for step in steps], dim=1) if steps else torch.empty(rows, 0, 0)
    written, prefix = chosen.shape[1], greedy.shape[1] - chosen.shape[1]
    if not written or prefix < 0 or not torch.equal(chosen.argmax(-1).cpu(), greedy[:, prefix:].cpu()):
        return told | {"not_judged": "stock's logits could not be told apart by tokens"}
    _, differences = first_differences(greedy[:, prefix:], ours[:, prefix:], chosen)
    # Either of two logits may be off by twice the bound on their root mean square.
    share = 4 * bound(LOGITS, dtype)
    pairs = [(0.0, 0.0), *((margin, share * float(at.square().mean().sqrt())) for margin, at in differences)]
    margin, allowed = max(pairs, key=lambda pair: (pair[0] != pair[0], pair[0] - pair[1]))
    if not margin <= allowed:
        raise WrongResult(f"a token differs that stock preferred by {margin:.2g}, more than the {allowed:.2g} of a tie")
    return told | {"margin": margin, "allowed": allowed}


@contextmanager
def _logits(obj: Any) -> Iterator[list[torch.Tensor]]:
    """Inside, the last position's logits of each call of the stock model's output head are kept."""
    kept: list[torch.Tensor] = []
    models: list[Any] = list(models_in(obj).values())
    head = models[0].get_output_embeddings() if len(models) == 1 else None
    if head is None:
        yield kept
        return
    with listening([(head, lambda module, args, output: kept.append(output[:, -1].detach()))]):
        yield kept
