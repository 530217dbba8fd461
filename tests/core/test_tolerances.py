"""Bounds of errors stand in one file of each package, and are what rounding explains."""

import re
from pathlib import Path

import accel_kernels.tolerances
import pytest
import torch

from accel import tolerances
from accel.tolerances import bound

BOUNDS = [Path(module.__file__) for module in (tolerances, accel_kernels.tolerances)]
BARE = re.compile(
    r"(?<![\w=])[<>]=? *(\d[\d.]*e-\d|\d*\.?\d+ *\* *\w+\.(abs|median))|[ar]tol=\d"
    r"|^[A-Z_]*(LIMIT|TOLERANCE|BOUND|FLOOR)S? *= *(\d+\.\d|\d+e-|\{)"
)


def bare(text: str) -> list[str]:
    """Lines that compare with a number of their own."""
    return [line.strip() for line in text.splitlines() if BARE.search(line)]


PLANTED = """
ok = error <= 1e-4
torch.allclose(a, b, atol=1e-6)
LIMITS = {torch.float16: 2e-2}
return off <= 0.02 * wanted.abs().max()
FLOOR = {torch.float32: 4e-6}
TOLERANCE = 0.5
"""
OF_OTHER_KINDS = """
x = 1e-5
if best < 0.9 * own:
SIZE_LIMIT = 16384
"""


def test_no_bound_stands_elsewhere():
    assert len(bare(PLANTED)) == 6 and not bare(OF_OTHER_KINDS)
    paths = [path for file in BOUNDS for path in file.parent.rglob("*.py") if path not in BOUNDS]
    assert not {str(path): found for path in paths if (found := bare(path.read_text()))}


@pytest.mark.parametrize("name", ["BLOCK", "FORMULA", "LOGITS"])
def test_tables_are_a_few_roundings_of_the_dtype(name):
    table = getattr(tolerances, name)
    for dtype in (torch.float16, torch.bfloat16):
        assert 1 <= bound(table, dtype) / torch.finfo(dtype).eps <= 21, dtype
    assert bound(table, torch.float32) < bound(table, torch.float16) < bound(table, torch.bfloat16)
    assert bound(table, torch.float8_e4m3fn) == table[None]


def test_a_wrong_factor_is_more_than_any_bound_of_a_formula():
    assert max(tolerances.FORMULA.values()) < 0.01 and tolerances.PREQUANTIZED < 0.3
    assert tolerances.ACTIVATION < 5e-4 and tolerances.NORM < tolerances.NORM_NARROW
