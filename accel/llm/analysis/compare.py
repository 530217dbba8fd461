"""When two tensors are the same result, computed in different ways."""

import torch

from accel.tolerances import FORMULA, SUM_EPS, bound


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far apart, root mean square relative to `wanted`; inf where shapes differ in size."""
    if got.numel() != wanted.numel():
        return float("inf")
    got, wanted = got.detach().flatten().double(), wanted.detach().flatten().double()
    return float((got - wanted).norm() / wanted.norm().clamp_min(1e-30))


def agree(got: torch.Tensor, wanted: torch.Tensor, slack: float = 1.0) -> bool:
    """Whether rounding explains the difference."""
    return off(got, wanted) <= slack * bound(FORMULA, wanted.dtype)


def factor(part: torch.Tensor, wanted: torch.Tensor) -> float:
    """The number by which `part` comes closest to `wanted`."""
    part, wanted = part.flatten().double(), wanted.flatten().double()
    return float(part @ wanted / (part @ part).clamp_min(1e-30))


def named_factor(found: float, dtype: torch.dtype, holders: tuple) -> float | None:
    """`found` as a number the model holds: 1, or a float among the attributes of `holders`; None for any other."""
    slack = bound(FORMULA, dtype)
    held = [value for holder in holders for value in vars(holder).values() if type(value) is float]
    return next((value for value in (1.0, *held) if abs(found - value) <= slack * abs(value)), None)


def is_sum(base: torch.Tensor, branch: torch.Tensor, scale: float, total: torch.Tensor) -> bool:
    """Whether total = base + scale * branch, but for what rounding does to a sum of this size; all (..., channels).

    Measured against the branch, which may be small: a factor on it must show. Token by token, for some are a thousand
    times larger than others and would hide them.
    """
    base, branch, exact = base.double(), scale * branch.double(), total.double()
    error, large, small = (tensor.norm(dim=-1) for tensor in (exact - base - branch, exact, branch))
    eps = torch.finfo(total.dtype).eps
    return bool((error <= SUM_EPS * eps * large + eps * small).all())
