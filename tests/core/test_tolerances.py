"""Bounds of errors stand in one file, and are what rounding explains."""

import re
from pathlib import Path

import pytest
import torch

from accel import tolerances
from accel.tolerances import bound

ACCEL = Path(tolerances.__file__).parent
BARE = re.compile(r"(?<![\w=])[<>]=? *\d[\d.]*e-\d|[ar]tol=\d|^[A-Z_]*(LIMIT|TOLERANCE|BOUND)S? *= *[\d{]")


def bare(text: str) -> list[str]:
    """Lines that compare with a number of their own."""
    return [line.strip() for line in text.splitlines() if BARE.search(line)]


def test_no_bound_stands_elsewhere():
    assert (
        len(bare("ok = error <= 1e-4\ntorch.allclose(a, b, atol=1e-6)\nLIMITS = {torch.float16: 2e-2}\nx = 1e-5")) == 3
    )
    paths = [path for path in ACCEL.rglob("*.py") if path.name != "tolerances.py"]
    assert not {str(path.relative_to(ACCEL)): found for path in paths if (found := bare(path.read_text()))}


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
