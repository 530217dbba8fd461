"""What the compiler makes of row programs at real sizes: memory in 16 bytes, and values that stay in their threads."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from support.kernels.compiler import in_a_process

CHECK = """
import re
import torch
from accel_kernels import rowwise
from accel_kernels.rowwise.cases import quantized_norm
from support.kernels.absent_gpu import GPU, absent_gpu

CASES = ("flux-adaptive", "flux-rotary", "wan-across-heads", "halves-rotary", "flux2-swiglu")
with absent_gpu(90) as found:
    for case in rowwise.cases:
        if case.name in CASES:
            args, more = case.make(GPU, torch.bfloat16)
            assert rowwise.supports(*args, **more) is None, case.name
            rowwise.triton(*args, **more)
    # Another number of rows is the same kernel.
    name, make = next((case.name, case.make) for case in rowwise.cases if case.name == CASES[0])
    (x, scale, shift), more = make(GPU, torch.bfloat16)
    rowwise.triton(x[:, :77], scale, shift, **more | {"shape": (1, 77)})
    assert found[-1].kernel is found[0].kernel
    for kind in ("int8", "fp8"):
        rowwise.triton(x, scale, shift, program=quantized_norm(3072, torch.bfloat16, kind), shape=(1, 4608))
for launch in (*found[:-3], *found[-2:]):
    compiled = launch.compiled()
    access = set(re.findall(r"(?:ld|st)\\.global[.\\w]*", compiled.asm["ptx"]))
    # Eight values to a thread are eight bytes where they are rounded to a byte each; a row has one scale and one peak.
    eight = re.search("tensor<.*x(i8|f8E4M3FN)>", compiled.asm["ttir"])
    narrow = {"st.global.v2.b32", "st.global.b32"} if eight else set()
    assert access == {"ld.global.v4.b32", "st.global.v4.b32"} | narrow, access
    assert compiled.asm["ptx"].count("griddepcontrol.wait") == 1
    moved = [line for line in compiled.asm["ttgir"].splitlines() if "convert_layout" in line]
    assert all(re.search("-> tensor<1(x1)?xf32", line) for line in moved), moved  # but one number of a row
    assert "fma" not in compiled.asm["ptx"] or "ex2" in compiled.asm["ptx"]  # but inside of functions
    print(launch.name)
"""


@pytest.mark.turns(4)
def test_rows_are_read_and_written_in_16_bytes(tmp_path: Path):
    assert len(in_a_process(CHECK, tmp_path).split()) == 7
