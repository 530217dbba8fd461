"""Whether two tensors are the same result, computed in different ways, by the bounds of `tolerances.py`."""

from collections.abc import Iterable

import torch
from torch.linalg import vector_norm
from torch.utils import _pytree as pytree

from accel.tolerances import FORMULA, SHARES, SUM_EPS, bound

TOKENS = 16  # at once: in float64, logits of a long text are large
STEPS, CLEAR, SURE = 8, 64, 6  # steps of rounding, least numbers and standard deviations of `is_plain_sum`


def relative_rms(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far apart, root mean square relative to `wanted`; inf where shapes differ in size, NaN where one is."""
    if got.numel() != wanted.numel():
        return float("inf")
    got, wanted = got.detach().flatten().double(), wanted.detach().flatten().double()
    return float(vector_norm(got - wanted) / vector_norm(wanted).clamp_min(1e-30))


def tensor_leaves(tree: object) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples, dictionaries and outputs, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def worst_rms(got: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor]) -> float:
    """`relative_rms` in the worst of several pairs; NaN where one is."""
    return worst(relative_rms(*pair) for pair in zip(got, wanted, strict=True))


def worst(errors: Iterable[float]) -> float:
    """The largest; NaN where one is, which is no number to compare."""
    return max(errors, key=lambda error: (error != error, error))


def relative_max(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference by the largest of `wanted`; inf where shapes differ, NaN where a number is not finite."""
    if got.shape != wanted.shape:
        return float("inf")
    got, wanted = got.float(), wanted.float()
    return float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))


def relative_rms_by_token(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """`relative_rms` of every token, (rows, tokens) float64; both (rows, tokens, channels)."""
    found = []
    for ours, theirs in zip(got.split(TOKENS, dim=1), wanted.split(TOKENS, dim=1), strict=True):
        ours, theirs = ours.detach().double(), theirs.detach().double()
        found.append(vector_norm(ours - theirs, dim=-1) / vector_norm(theirs, dim=-1).clamp_min(1e-30))
    return torch.cat(found, dim=1)


def first_differences(
    stock: torch.Tensor, ours: torch.Tensor, logits: torch.Tensor
) -> tuple[int, list[tuple[float, torch.Tensor]]]:
    """How many tokens are equal before each row's first difference, and for rows that differ the margin by which stock
    preferred its own token there, and its logits.

    stock, ours: (rows, tokens); logits: of stock's run, (rows, tokens, vocabulary).
    """
    stock, ours = stock.cpu(), ours.cpu()
    equal, found = 0, []
    for row, (wanted, got) in enumerate(zip(stock, ours, strict=True)):
        differs = (wanted != got).nonzero()
        at = int(differs[0]) if len(differs) else len(wanted)
        equal += at
        if at < len(wanted):
            scores = logits[row, at]
            found.append((float(scores[wanted[at]].double() - scores[got[at]].double()), scores))
    return equal, found


def agree(got: torch.Tensor, wanted: torch.Tensor, slack: float = 1.0) -> bool:
    """Whether rounding explains the difference."""
    return relative_rms(got, wanted) <= slack * bound(FORMULA, wanted.dtype)


def rows_agree(got: torch.Tensor, wanted: torch.Tensor, allowed: float = SHARES[torch.float32]) -> bool:
    """Whether no number of a row is further off than this share of the row's largest."""
    if got.shape != wanted.shape:
        return False
    got, wanted = got.float(), wanted.float()
    return bool(((got - wanted).abs() <= allowed * wanted.abs().amax(-1, keepdim=True)).all())


def factor(part: torch.Tensor, wanted: torch.Tensor) -> float:
    """The number by which `part` comes closest to `wanted`."""
    part, wanted = part.flatten().double(), wanted.flatten().double()
    return float(part @ wanted / (part @ part).clamp_min(1e-30))


def named_factor(found: float, dtype: torch.dtype, holders: tuple) -> float | None:
    """`found` as a number the model holds: 1, or an attribute of `holders` or what one divides by; else None."""
    slack, held = bound(FORMULA, dtype), held_floats(holders)
    known = (1.0, *held, *(1.0 / value for value in held if value))
    return next((value for value in known if abs(found - value) <= slack * abs(value)), None)


def held_floats(holders: tuple) -> list[float]:
    """Those among the attributes of these objects."""
    return [value for holder in holders for value in vars(holder).values() if type(value) is float]


def is_sum(base: torch.Tensor, branch: torch.Tensor, scale: float, total: torch.Tensor) -> bool:
    """Whether total = base + scale * branch up to rounding; all (..., channels).

    Measured against the branch, which may be small, so that a factor on it shows. Token by token, since some are a
    thousand times larger than others.
    """
    base, branch, exact = base.double(), scale * branch.double(), total.double()
    error, large, small = (tensor.norm(dim=-1) for tensor in (exact - base - branch, exact, branch))
    eps = torch.finfo(total.dtype).eps
    return bool((error <= SUM_EPS * eps * large + eps * small).all())


def is_plain_sum(base: torch.Tensor, branch: torch.Tensor, total: torch.Tensor) -> bool:
    """`is_sum` with a scale of 1, and none close to it: all numbers together tell it better than one of them is held.

    They are those of a few steps of rounding of the sum: what is smaller may be lost as a whole.
    """
    if not is_sum(base, branch, 1.0, total):
        return False
    base, branch, total, eps = base.double(), branch.double(), total.double(), torch.finfo(total.dtype).eps
    size = torch.maximum(base.abs(), total.abs()).clamp_min(1e-30)
    clear = branch.abs() >= STEPS * eps * size
    x, y = (branch / size)[clear], ((total - base) / size)[clear]
    if len(x) < CLEAR:
        return True
    # Rounding of the sum and of what is added is uniform, and of no sign: so far it may put the mean off.
    rounding = SURE * eps * ((1 + x.square()) / 12).sqrt()
    return bool((x @ (y - x)).abs() <= (x * rounding).norm() + (eps / 64 + 1e-7) * (x @ x))
