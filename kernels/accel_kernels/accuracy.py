"""Whether another function computes what an op computes: compared with its reference in float64, on its cases."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from accel_kernels.op import FLOATS, Case, Op
from accel_kernels.tolerances import FLOOR, SMALLEST_PEAK, TIMES_TORCH


class Wrong(Exception):
    """On which case a function differs from the op, and by how much."""


def check(op: Op, function: Callable) -> int:
    """Runs function on the op's cases: small ones on the CPU, on a GPU all. Returns how many calls it took.

    function: takes what `op.reference` takes and returns what that returns, in new memory; NotImplemented for a call
    that it leaves to the op. Tensors that the reference writes into, such as stored keys, are compared too. An error
    may be twice that of the reference in the same dtype.
    Raises Wrong, naming the case.
    """
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    taken = 0
    with torch.no_grad():
        for device in map(torch.device, devices):
            for number, case in enumerate(case for case in op.cases if case.small or device.type == "cuda"):
                # Small cases in every dtype; large ones in one of 16 bits, since float64 of them takes memory.
                for dtype in FLOATS if case.small else FLOATS[number % 2 : number % 2 + 1]:
                    try:
                        taken += _takes(op, function, case, device, dtype)
                    except torch.OutOfMemoryError:
                        if case.small:
                            raise
    return taken


def _takes(op: Op, function: Callable, case: Case, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the function took this call. Raises Wrong."""
    name = f"case {case.name!r} in {str(dtype).removeprefix('torch.')} on {device.type}"
    given = case.make(device, dtype)
    try:
        result = function(*given[0], **given[1])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise Wrong(f"{name}: it raised {type(error).__name__}: {error}") from error
    if result is NotImplemented:
        return False
    theirs, exact = _ran(op, case.make(device, dtype)), _ran(op, tree_map(in_float64, case.make(device, dtype)))
    forms = [str(tree_map(_form, one)).replace("'", "") for one in (result, theirs[0])]
    if forms[0] != forms[1]:
        raise Wrong(f"{name}: it returned {forms[0]}, the reference {forms[1]}")
    for mine, torchs, truth in zip(*map(_wide, ((result, given), theirs, exact)), strict=True):
        if mine.shape != torchs.shape or mine.dtype != torchs.dtype:
            raise Wrong(f"{name}: {tuple(mine.shape)} in {mine.dtype}, not {tuple(torchs.shape)} in {torchs.dtype}")
        if not mine.numel():
            continue
        peak = truth.abs().nan_to_num(nan=0.0).max().double().clamp_min(SMALLEST_PEAK)
        off, own = (float(_difference(t, truth) / peak) for t in (mine, torchs))
        if not off <= TIMES_TORCH * own + FLOOR[dtype]:
            raise Wrong(f"{name}: error {off:.1e}, more than twice torch's own {own:.1e}")
    return True


def _ran(op: Op, given: tuple[tuple, dict]) -> tuple:
    """What the reference returns, and its arguments, into which it may have written."""
    return op.reference(*given[0], **given[1]), given


def _difference(t: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """The largest; equal infinities, as of masks, do not differ, nor what is no number in both."""
    t, truth = t.double(), truth.double()
    alike = (t == truth) | (t.isnan() & truth.isnan())
    return torch.where(alike, 0.0, t - truth).abs().max()


def _wide(values: Any) -> list[torch.Tensor]:
    """All tensors of floating-point numbers inside, but for codes of one byte."""
    return [one for one in tree_leaves(values) if _is_wide(one)]


def _is_wide(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize > 1


def _form(value: object) -> object:
    """What is returned, but for the numbers in it."""
    return "a tensor" if isinstance(value, torch.Tensor) else value


def in_float64(value: Any) -> Any:
    """The same argument in float64."""
    if isinstance(value, torch.dtype):  # of the result
        return torch.float64
    return value.double() if _is_wide(value) else value
