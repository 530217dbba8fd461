"""Row programs in one pass: chooses how rows are cut into programs, and launches the kernel written for the program."""

import hashlib
import linecache
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from accel_kernels.device import Feature, has
from accel_kernels.rowwise import functions_triton, row_numbers_triton
from accel_kernels.rowwise.program import RowProgram, lanes, register_widths
from accel_kernels.rowwise.source import Source
from accel_kernels.rowwise.tiling import (
    Memory,
    access_of,
    collapsed,
    contiguous,
    expanded,
    farthest,
    tiled,
)
from accel_kernels.warmup import launch


class Plan(NamedTuple):
    """A kernel and its launch arguments. strides: behind each pointer. sizes: of rows. results: shapes and dtypes."""

    kernel: Any
    grid: tuple[int]
    strides: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    warps: int
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]


def rowwise(first, *others, program, shape, outputs=None):
    """Same arguments and result as the reference."""
    inputs = (first, *others)
    given = outputs or (None,) * len(program.results)
    early = has(first.device, Feature.DEPENDENT_LAUNCH)
    plan = plan_of(
        program,
        tuple(shape),
        tuple((one.shape, one.stride(), one.dtype) for one in inputs),
        tuple(None if one is None else one.stride() for one in given),
        early,
        not has(first.device, Feature.FLOAT8_AT_ONCE),
    )
    results = tuple(
        torch.empty(size, dtype=dtype, device=first.device) if one is None else one
        for one, (size, dtype) in zip(given, plan.results, strict=True)
    )
    arguments: list[Any] = []
    for tensor, strides in zip((*inputs, *results), plan.strides, strict=True):
        arguments += [tensor, *strides]
    pdl = {"launch_pdl": True} if early else {}
    launch(plan.kernel, plan.grid, *arguments, *plan.sizes, num_warps=plan.warps, enable_fp_fusion=False, **pdl)
    return results


@lru_cache(maxsize=4096)
def plan_of(
    program: RowProgram,
    shape: tuple[int, ...],
    inputs: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...],
    outputs: tuple[tuple[int, ...] | None, ...],
    early: bool,
    by_hand: bool,
) -> Plan:
    """How a call is launched, by shapes, strides and dtypes of inputs, strides of outputs. early, by_hand: see
    `Source`.
    """
    widths = register_widths(program)
    results = tuple(
        ((*shape, lanes(widths[number], program)), dtype)
        for number, dtype in zip(program.results, program.dtypes, strict=True)
    )
    read = [
        expanded(*one, len(shape) + 1, lanes(width, program)) for one, width in zip(inputs, program.inputs, strict=True)
    ]
    written = [
        Memory(contiguous(size) if strides is None else strides, 0, dtype)
        for strides, (size, dtype) in zip(outputs, results, strict=True)
    ]
    tensors = read + written
    sizes, strides = collapsed(shape, [one.strides[:-1] for one in tensors])
    accesses = [access_of(rows, one) for rows, one in zip(strides, tensors, strict=True)]
    wide = any(farthest(sizes, rows, one, program.width) >= 2**31 for rows, one in zip(strides, tensors, strict=True))
    tiling, programs = tiled(program, sizes, wide)
    by_hand &= torch.float8_e4m3fn in program.dtypes  # else two texts would be one
    both = tuple(accesses[: len(inputs)]), tuple(accesses[len(inputs) :])
    kernel = kernel_of(program, *both, tiling, early, by_hand)
    passed = []
    for access, rows, one in zip(accesses, strides, tensors, strict=True):
        by_unit = tuple(stride // access.unit for stride in rows if stride)
        passed.append(by_unit + (one.strides[-1],) * (access.lanes < 0))
    return Plan(kernel, (programs,), tuple(passed), sizes, tiling.warps, results)


@lru_cache(maxsize=1024)
def kernel_of(*source: Any) -> Any:
    """The kernel, compiled on demand, of the text that `Source` writes of these arguments."""
    return _jit(Source(*source).text)


@lru_cache(maxsize=1024)
def _jit(text: str) -> Any:
    # Triton reads a function's lines from its file; Python's cache of lines takes the place of one.
    name = f"<rowwise {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope = {**vars(functions_triton), **vars(row_numbers_triton), "__name__": __name__}  # what the text may call
    exec(compile(text, name, "exec"), scope)  # the text is made of names of our own and numbers
    function = scope["rowwise_kernel"]
    numbers = [
        one for one in function.__code__.co_varnames[: function.__code__.co_argcount] if not one.endswith("_ptr")
    ]
    kernel = triton.jit(do_not_specialize=numbers)(function)
    kernel.written_by = __name__, _jit.__qualname__, (text,)  # no file has it, see `compilers_triton`
    return kernel
