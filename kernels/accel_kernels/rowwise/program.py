"""A row program: pointwise operations, reductions over the last dimension and moves of lanes, as data.

Register n holds input n; every operation appends one more. Values are fp32, rounded to an operation's dtype.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

from accel_kernels.rowwise.operations import OPERATIONS

FULL, HALF, ONE = "full", "half", "one"  # the width of a register: C lanes, C // 2, or one

BINARY, WITH_NUMBER, UNARY, TO_ONE, NORMS = (
    tuple(name for name, one in OPERATIONS.items() if one.kind == kind)
    for kind in ("binary", "number", "unary", "to_one", "norm")
)
# What gives numbers of 8 bits, from values and the peak of their row; a result and nothing else.
NUMBERS = {"numbers_int8": torch.int8, "numbers_fp8": torch.float8_e4m3fn}
REDUCTIONS = TO_ONE + NORMS
# Moves of lanes: between C and C // 2 of them.
TAKE_PAIRS, TAKE_HALVES = ("even", "odd"), ("first", "second")
MOVES_PAIRS, MOVES_HALVES = (*TAKE_PAIRS, "interleave"), (*TAKE_HALVES, "concatenate")
TWO = (*BINARY, *NUMBERS, "interleave", "concatenate")  # those that take two registers


class RowOp(NamedTuple):
    """One operation on registers.

    name: one of OPERATIONS. `rsub_number` is number - x, `rdiv_number` number / x, `round` rounds to the dtype only.
        `div_number` multiplies by 1 / number on a GPU, as torch does there.
        `layer_norm` is (x - mean) / sqrt(var + number), `rms_norm` x / sqrt(mean(x^2) + number), not rounded inside.
        `peak`, `scale_` of a peak, and `numbers_` of values and their peak are the functions of `row_numbers.py`.
        `even` and `odd` take every second lane, `first` and `second` each half; `interleave` and `concatenate` undo it.
    args: the numbers of the registers it takes.
    number: of the operations that take one.
    dtype: what the result is rounded to; float32 is not rounded.
    """

    name: str
    args: tuple[int, ...]
    number: float = 0.0
    dtype: torch.dtype = torch.float32


class RowProgram(NamedTuple):
    """Operations on every row of an index space (n_1, .., n_rows, C).

    rows: how many dimensions stand before the last.
    width: C.
    inputs: the widths of the inputs; registers 0 to n - 1, in the dtypes of the tensors given.
    ops: each appends one register.
    results: the registers to store, by number.
    dtypes: of the results; 8 bits for what `numbers_` give, and for nothing else.
    """

    rows: int
    width: int
    inputs: tuple[str, ...]
    ops: tuple[RowOp, ...]
    results: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]


def lanes(width: str, program: RowProgram) -> int:
    """How many lanes a register of this width has."""
    return {FULL: program.width, HALF: program.width // 2, ONE: 1}[width]


@lru_cache(maxsize=1024)
def register_widths(program: RowProgram) -> tuple[str, ...]:
    """The width of every register. Raises ValueError for a program that means nothing, and says why."""
    if program.width < 1 or not program.inputs or not program.results:
        raise ValueError("a row program needs lanes, an input and a result")
    if len(program.results) != len(program.dtypes):
        raise ValueError(f"{len(program.results)} results and {len(program.dtypes)} dtypes")
    unknown = set(program.inputs) - {FULL, HALF, ONE}
    if unknown:
        raise ValueError(f"input of width {unknown.pop()!r}, not 'full', 'half' or 'one'")
    widths = list(program.inputs)
    for op in program.ops:
        if any(not 0 <= arg < len(widths) for arg in op.args):
            raise ValueError(f"{op.name} of a register that is not there yet: {op.args}")
        widths.append(_width(op, [widths[arg] for arg in op.args]))
    if any(not 0 <= result < len(widths) for result in program.results):
        raise ValueError(f"results {program.results} of {len(widths)} registers")
    for result, dtype in zip(program.results, program.dtypes, strict=True):
        made = program.ops[result - len(program.inputs)].name if result >= len(program.inputs) else ""
        if NUMBERS.get(made) != (dtype if dtype in NUMBERS.values() else None):
            raise ValueError(f"a result of {dtype} from {made or 'an input'}")
    numbers = {n for n, op in enumerate(program.ops, len(program.inputs)) if op.name in NUMBERS}
    if any(arg in numbers for op in program.ops for arg in op.args):
        raise ValueError("an operation on numbers of 8 bits")
    if HALF in widths and program.width % 2:
        raise ValueError(f"halves of {program.width} lanes")
    return tuple(widths)


def rounded_alone(program: RowProgram) -> frozenset[int]:
    """The registers that nothing but a rounding to 8 bits takes in the end: no one sees their last digits."""
    users: dict[int, list[int]] = {}
    for number, op in enumerate(program.ops, len(program.inputs)):
        for arg in op.args:
            users.setdefault(arg, []).append(number)
    ends = {n for n, op in enumerate(program.ops, len(program.inputs)) if op.name in (*NUMBERS, "peak")}
    if not any(op.name in NUMBERS for op in program.ops):
        return frozenset()
    found: set[int] = set()
    for number in range(len(program.inputs) + len(program.ops) - 1, -1, -1):
        by = users.get(number, [])
        if by and number not in program.results and all(one in found or one in ends for one in by):
            found.add(number)
    return frozenset(found - ends)


def _width(op: RowOp, given: list[str]) -> str:
    """The width of an operation's result, from those of its registers."""
    if op.name not in OPERATIONS:
        raise ValueError(f"operation {op.name!r}")
    if len(given) != 1 + (op.name in TWO):
        raise ValueError(f"{op.name} of {len(given)} registers")
    if op.name in TAKE_PAIRS + TAKE_HALVES:
        return _expect(op, given, FULL, HALF)
    if op.name in ("interleave", "concatenate"):
        return _expect(op, given, HALF, FULL)
    if op.name in REDUCTIONS:
        if given[0] == ONE:
            raise ValueError(f"{op.name} over one lane")
        return ONE if op.name in TO_ONE else given[0]
    if op.name in NUMBERS and given[1] != ONE:
        raise ValueError(f"{op.name} by a peak of {given[1]} lanes")
    wide = set(given) - {ONE}
    if len(wide) > 1:
        raise ValueError(f"{op.name} of {given[0]} and {given[1]} lanes")
    return wide.pop() if wide else ONE


def _expect(op: RowOp, given: list[str], taken: str, made: str) -> str:
    if set(given) != {taken}:
        raise ValueError(f"{op.name} of {' and '.join(given)} lanes, not {taken}")
    return made
