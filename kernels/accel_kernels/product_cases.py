"""Cases of products, which tests and benchmarks run: with weights of any kind, and what stands before and after."""

import torch

from accel_kernels.norm.norm import Norm
from accel_kernels.op import Random, random_cases


@random_cases
def product_case(
    rand, shape, n, *, weight=None, rows=None, norm=None, bias=False, gate=False, activation=None, residual=False,
    scale=1.0, modulation=False, wide=False, addend=False, share=False,
):  # fmt: skip
    """x of this shape times a weight (n, shape[-1]).

    weight, rows: what the op takes in place of a weight in full and of x. norm: "rms", "gemma" or "layer". bias, gate,
    residual, modulation, addend, share: whether there is one, the modulation for each of shape[0] parts. wide: x and
    residual are float32, or "residual" or "weight" alone.
    """
    k = shape[-1]
    sums = {"dtype": torch.float32} if wide else {}

    def matrix():
        full = rand(n, k, spread=k**-0.5, **(sums if wide == "weight" else {}))
        return full if weight is None else weight(full)

    given = {"activation": activation, "scale": scale}
    if norm is not None:
        given["norm"] = case_norm(norm, rand, k)
    if gate:
        given |= {"up": matrix(), "up_bias": rand(n) if bias else None}
    if residual:
        given["residual"] = rand(*shape[:-1], n, **sums)
    if modulation:
        given["modulation"] = rand(shape[0], n)
    if addend:
        given["addend"] = rand(*shape[:-1], n)
    if share:
        given["share"] = rand(*shape[:-1], 1)
    x = rand(*shape, **(sums if wide is True else {}))
    shift = rand(n, **(sums if wide == "weight" else {})) if bias else None
    return (x if rows is None else rows(x), matrix(), shift), given


def case_norm(kind: str | None, rand: Random, channels: int) -> Norm | None:
    """kind: "rms", "gemma", "layer" or None."""
    if kind is None:
        return None
    if kind == "layer":
        return Norm(rand(channels), rand(channels), 1e-5, centered=True)
    return Norm(rand(channels), None, 1e-5) if kind == "rms" else Norm(rand(channels), None, 1e-6, offset=1.0)
