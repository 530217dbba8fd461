"""A small program of pointwise operations and reductions over the last dimension, in one pass over memory.

All that stands between two matrix products of a transformer is of this kind: adaptive norms (Peebles and Xie, 2023),
gated residuals and activations (Shazeer, 2020), norms of queries and keys with a rotary embedding (Su et al., 2021).
The kernel rounds where the program says, as a chain of torch's operations does.
"""

from functools import lru_cache

import torch

from accel_kernels.device import float8_reason
from accel_kernels.op import FLOATS, dtype_reason, make_op
from accel_kernels.rowwise.cases import CASES
from accel_kernels.rowwise.operations import OPERATIONS
from accel_kernels.rowwise.program import (
    MOVES_HALVES,
    MOVES_PAIRS,
    NORMS,
    NUMBERS,
    REDUCTIONS,
    WITH_NUMBER,
    RowOp,
    RowProgram,
    lanes,
    register_widths,
)

MOST_REDUCED = 16384  # lanes of a row that one program holds

TORCH = {name: one.reference for name, one in OPERATIONS.items()}
NUMBERED = (*WITH_NUMBER, *NORMS)
ROUND_INSIDE = ("rdiv_number", "rms_norm")  # as their references are written, in 16 bits


def reference(first, *others, program, shape, outputs=None):
    """first, others: tensors broadcastable to (*shape, lanes), of any strides; program: a RowProgram; shape: of rows.
    A last dimension that divides the lanes is repeated along them: one table of a head for a row of many heads.

    outputs: None, or for each result None or a tensor (*shape, lanes) of its dtype that is written; what is written
    must not overlap. Returns the results, a tuple. Raises ValueError for what the program cannot mean.
    """
    widths, _ = _examine(first, *others, program=program, shape=shape, outputs=outputs)
    registers = []
    for tensor, width in zip((first, *others), program.inputs, strict=True):
        registers.append(_along(tensor, lanes(width, program)))
    for op in program.ops:
        registers.append(_apply(op, [registers[arg] for arg in op.args]))
    read = {tensor.untyped_storage().data_ptr() for tensor in (first, *others)}
    found = []
    for number, register in enumerate(program.results):
        value = registers[register].to(program.dtypes[number]).expand(*shape, lanes(widths[register], program))
        if value.untyped_storage().data_ptr() in read or not value.is_contiguous():  # a part of an input, as it stands
            value = value.clone(memory_format=torch.contiguous_format)
        found.append(value)
    given = outputs or (None,) * len(found)
    return tuple(value if one is None else one.copy_(value) for one, value in zip(given, found, strict=True))


def _along(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The tensor with so many lanes."""
    last = tensor.shape[-1] if tensor.dim() else 1
    if last in (1, count):
        return tensor.expand(*tensor.shape[:-1], count)
    return tensor.repeat(*(1,) * (tensor.dim() - 1), count // last)


def _apply(op: RowOp, args: list[torch.Tensor]) -> torch.Tensor:
    number = (op.number,) if op.name in NUMBERED else ()
    if op.name not in ROUND_INSIDE and all(arg.dtype == op.dtype for arg in args):
        return TORCH[op.name](*args, *number)  # torch computes in fp32 and rounds once
    kind = torch.float64 if torch.float64 in [op.dtype, *(arg.dtype for arg in args)] else torch.float32
    return TORCH[op.name](*(arg.to(kind) for arg in args), *number).to(op.dtype)


def _examine(first, *others, program: RowProgram, shape, outputs=None) -> tuple[tuple[str, ...], str | None]:
    """The width of every register, and why the kernel does not run the program. Raises ValueError."""
    written = None if outputs is None else tuple(None if one is None else (one.shape, one.dtype) for one in outputs)
    return _examined(program, tuple(shape), tuple(one.shape for one in (first, *others)), written)


@lru_cache(maxsize=4096)
def _examined(
    program: RowProgram,
    shape: tuple[int, ...],
    inputs: tuple[torch.Size, ...],
    outputs: tuple[tuple[torch.Size, torch.dtype] | None, ...] | None,
) -> tuple[tuple[str, ...], str | None]:
    widths = register_widths(program)
    if len(shape) != program.rows:
        raise ValueError(f"rows {shape} of a program for {program.rows} dimensions")
    if len(inputs) != len(program.inputs):
        raise ValueError(f"{len(inputs)} tensors for {len(program.inputs)} inputs")
    for number, (given, width) in enumerate(zip(inputs, program.inputs, strict=True)):
        if not _fits(given, (*shape, lanes(width, program))):
            raise ValueError(f"input {number} of shape {tuple(given)} for {width} lanes of rows {shape}")
    if outputs is not None and len(outputs) != len(program.results):
        raise ValueError(f"{len(outputs)} outputs for {len(program.results)} results")
    for number, output in enumerate(outputs or ()):
        wanted = (*shape, lanes(widths[program.results[number]], program)), program.dtypes[number]
        if output is not None and (tuple(output[0]), output[1]) != wanted:
            raise ValueError(f"output {number} of {tuple(output[0])} in {output[1]}, not {wanted[0]} in {wanted[1]}")
    return widths, "empty" if 0 in shape else _program_reason(program)


def _fits(given: torch.Size, wanted: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape can be expanded to that, or repeated along the last dimension."""
    if len(given) > len(wanted):
        return False
    rows = zip(given[:-1], wanted[len(wanted) - len(given) : -1], strict=True)
    return all(a in (1, b) for a, b in rows) and (not given or (given[-1] > 0 and wanted[-1] % given[-1] == 0))


def supports(first, *others, program, shape, outputs=None) -> str | None:
    wide = (one for one in outputs or () if one is not None and one.dtype in FLOATS)  # those of 8 bits: `_examine`
    return (
        _examine(first, *others, program=program, shape=shape, outputs=outputs)[1]
        or dtype_reason(first, *others, *wide)
        or float8_reason(first.device, *program.dtypes)
        or next(filter(None, (_written_reason(one, (first, *others)) for one in outputs or ())), None)
    )


def _program_reason(program: RowProgram) -> str | None:
    """Why the kernel does not run this program."""
    names = {op.name for op in program.ops}
    if program.width > MOST_REDUCED and not names.isdisjoint(REDUCTIONS):
        return f"a reduction over {program.width} lanes, more than {MOST_REDUCED}"
    if not names.isdisjoint(MOVES_PAIRS) and not names.isdisjoint(MOVES_HALVES):
        return "lanes taken by pairs and by halves"
    wrong = {op.dtype for op in program.ops}.union(program.dtypes).difference(FLOATS, NUMBERS.values())
    return f"dtype {wrong.pop()} is not float16, bfloat16 or float32" if wrong else None


def _written_reason(output: torch.Tensor | None, inputs: tuple[torch.Tensor, ...]) -> str | None:
    """Why this memory cannot be written while the inputs are read."""
    if output is None:
        return None
    if any(stride == 0 and size > 1 for stride, size in zip(output.stride(), output.shape, strict=True)):
        return "an output whose elements share memory"
    if not output.untyped_storage().data_ptr():  # a tensor without memory
        return None
    start, end = _bytes(output)
    for one in inputs:
        first, last = _bytes(one)
        same = one.data_ptr() == start and one.shape == output.shape and one.stride() == output.stride()
        if first < end and start < last and not (same and one.dtype == output.dtype):
            return "an output that overlaps an input"
    return None


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's memory begins and ends."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (span + 1) * tensor.element_size()


rowwise = make_op("rowwise", reference, supports, CASES)
