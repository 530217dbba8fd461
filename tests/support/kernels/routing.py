"""What a router's kernel is compared by, in Triton's interpreter and on a GPU."""

import torch
from accel_kernels import route
from accel_kernels.moe.route import CASES

from support.kernels.numbers import FLOOR, TRUNCATION


def route_case(name: str, device: torch.device, dtype: torch.dtype) -> tuple:
    args, _ = next(case for case in CASES if case.name == name).make(device, dtype)
    return args


def poisoned(monkeypatch) -> None:
    """Fresh memory holds NaN, or a number that no kernel writes, so that an element no program wrote shows."""
    for name in ("empty", "empty_like"):

        def filled(*args, make=getattr(torch, name), **kwargs):  # noqa: B008 (torch's own, before it is replaced)
            tensor = make(*args, **kwargs)
            if tensor.dtype is torch.bool:
                return tensor.fill_(True)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)

        monkeypatch.setattr(torch, name, filled)


def assert_routes_as_torch(logits, routing, bias=None, dtype=None) -> None:
    """The same choices as the reference's; shares at most twice as far from float64 as its own, row by row."""
    assert route.supports(logits, routing, bias, dtype) is None
    index, shares = route.triton(logits, routing, bias, dtype)
    wanted, torchs = route.reference(logits, routing, bias, dtype)
    assert index.dtype == torch.int64 and torch.equal(index, wanted)
    exact_index, exact = route.reference(logits.double(), routing, None if bias is None else bias.double())
    assert torch.equal(exact_index, wanted)
    kind = dtype or logits.dtype
    assert shares.dtype == torchs.dtype == kind
    peak = exact.abs().amax(-1, keepdim=True)
    error, own = (float(((one.double() - exact).abs() / peak).max()) for one in (shares, torchs))
    slack = FLOOR[kind] + (0.0 if logits.is_cuda else TRUNCATION.get(kind, 0.0))
    assert error <= 2 * own + slack, f"error {error:.1e}, torch's own {own:.1e}"
