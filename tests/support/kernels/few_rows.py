"""Products of few rows on tensor cores, run as plain Python and compared with the formula in float64."""

from types import SimpleNamespace

import numpy as np
import torch
from accel_kernels import Norm
from accel_kernels.gemm.quantized.quantized_linear import quantized_linear

from support.kernels.numbers import numbers_of
from support.kernels.warpgroups import Array, Gluon, rebuilt


def machine_with(modules, *layouts, **names):
    """A machine, and functions of these modules as they run there on 4 bits. layouts: functions that say nothing."""
    machine = Gluon(True)
    wait = SimpleNamespace(gdc_wait=lambda: None, gdc_launch_dependents=lambda: None)
    return machine, rebuilt(
        modules, gl=machine, mma_v2=machine.mma_v2, zero_point=lambda *_: 136, pairs=numbers_of("int4", False, 136),
        tl=machine.triton(wait), range=lambda *to: map(Array, range(*map(int, to))),
        activate=lambda y, kind: Array(np.maximum(y.data, 0)) if kind == "relu" else y,
        **dict.fromkeys(layouts, lambda *_: None), **names,
    )  # fmt: skip


def check_product(rand, rows, weight, up, norm, tile):
    """Asserts that the kernel is at most twice as far from the exact result as the formula in 16 bits. rand: of a size.
    up: of a gate, or None. norm: by its name.
    """
    n, k = weight.shape
    norms = {"none": None, "rms": Norm(rand(k), None, 1e-5), "gemma": Norm(rand(k), None, 1e-6, offset=1.0)}
    norms["layer"] = Norm(rand(k), rand(k), 1e-5, centered=True)
    more = {"norm": norms[norm], "residual": rand(rows, n), "scale": 0.5, "activation": "relu"}
    more |= {} if up is None else {"up": up, "up_bias": rand(n)}
    x, bias = rand(rows, k), rand(n)
    found = quantized_linear.triton(x, weight, bias, **more, shape=tile)
    wide = {name: one.double() if isinstance(one, torch.Tensor) else one for name, one in more.items()}
    if more["norm"] is not None:
        wide["norm"] = Norm(*(one.double() if isinstance(one, torch.Tensor) else one for one in more["norm"]))
    wanted = quantized_linear.reference(x.double(), weight, bias.double(), **wide)
    theirs = (quantized_linear.reference(x, weight, bias, **more).double() - wanted).abs().max()
    assert (found.double() - wanted).abs().max() <= 2 * theirs
