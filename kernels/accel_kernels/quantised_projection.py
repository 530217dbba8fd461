"""A linear layer over a weight in fewer bits, with its neighbours: what `projection` does, `weight` a `Quantised`."""

from accel_kernels.op import Op
from accel_kernels.projection import reference as plain
from accel_kernels.quantised import Quantised


def reference(x, weight, bias=None, *, up=None, **options):
    """As `projection`; weight, up: Quantised (N, K), read in the dtype of x."""
    up = None if up is None else up.dequantised(x.dtype)
    return plain(x, weight.dequantised(x.dtype), bias, up=up, **options)


def supports(x, weight: Quantised, bias=None, **options) -> str | None:
    return "no kernel yet"


quantised_projection = Op("quantised_projection", reference, "", supports)
