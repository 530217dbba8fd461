"""What is written in PTX of unpacking words, over numpy, for kernels that are emulated."""

import numpy as np
import torch
from accel_kernels.gemm.quantized.quantized_linear import FP8, INT4, INT8

from support.kernels.warpgroups import Array

FORMATS = {"int8": INT8, "int4": INT4, "fp8": FP8}


def numbers_of(format, neighbors, middle):
    """`pairs` as its text has it: which number of a word is which of the results."""
    order = (0, 4, 1, 5, 2, 6, 3, 7) if format == "int4" else (0, 1, 2, 3) if neighbors else (0, 2, 1, 3)

    def pairs(words, scales, zeros, *flags):
        words = words.data.astype(np.int64)
        found = []
        for place in order:
            if format == "int4":
                number = (words >> 4 * place & 15) - 8.0
            else:
                one = torch.from_numpy((words >> 8 * place & 255).astype(np.uint8))
                number = one.view(FORMATS[format]).double().numpy()
            if isinstance(zeros, Array):
                number = number + middle + zeros.data
            elif flags[-1]:  # raw
                number = number + middle
            found.append(Array(number * scales.data if isinstance(scales, Array) else number))
        return found

    return pairs


def spread(values, repeats, given):
    return Array(np.repeat(values.data, repeats, axis=2)) if given else values
