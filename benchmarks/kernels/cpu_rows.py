"""One row times a matrix on one thread of a CPU: bf16, int8 by torch's own product, and int8 written out before.

Microseconds, the median of calls in turns; 1024 inputs, 2048 outputs.
"""

import statistics
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from accel_kernels import quantized_linear

from accel.bench.timing import seconds, take_turns
from accel.comparison import relative_rms
from accel.quantization.rounding import round_to_nearest
from accel.quantization.scheme import Scheme
from benchmarks.study import Study

INPUTS, OUTPUTS, CALLS = 1024, 2048, 300
CPU = torch.device("cpu")


def main(out: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, weight = torch.randn(1, INPUTS).bfloat16(), (torch.randn(OUTPUTS, INPUTS) / INPUTS**0.5).bfloat16()
    held = round_to_nearest(weight, Scheme.parse("int8"))
    ways = {
        "bf16": lambda: F.linear(x, weight),
        "int8": lambda: quantized_linear(x, held),
        "int8, written out": lambda: F.linear(x, held.dequantized(torch.bfloat16)),
    }
    wanted = x.double() @ held.dequantized(torch.float64).t()
    for name, way in ways.items():
        off = relative_rms(way(), wanted)
        assert name == "bf16" or off <= 0.01, f"{name} is off by {off:.1%}"
    found = take_turns({name: partial(seconds, way, CPU) for name, way in ways.items()}, least=CALLS, most=CALLS)
    us = {name: round(1e6 * statistics.median(times), 1) for name, times in found.items()}
    record = Study("rows-on-a-cpu", out, "one row on one thread", dtype=torch.bfloat16, inputs=INPUTS, outputs=OUTPUTS)
    record.keep_rows({"us": us})
