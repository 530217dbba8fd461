"""Every op's kernel beside its reference in torch, over OPS x CASES: errors first, then microseconds in a CUDA graph.

Errors are the largest against float64, by the largest number; one more than twice torch's own is no row. `gb_s` counts
inputs and outputs once. Row programs and linear attention go through copies that are larger together than the cache,
beside `limit_us`, the time of their bytes at 4.2 TB/s; all other operands lie in the cache where they are small.
Attention is timed by each backend at the sizes of image models. What draws, chooses or rounds has studies of its own.
"""

import copy
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from accel_kernels import OPS, Case, Op
from accel_kernels.attention.backends import BACKENDS
from torch.utils import _pytree as pytree

from accel.bench.timing import seconds
from accel.comparison import tensor_leaves
from benchmarks.kernels.timer import time_us, times_us
from benchmarks.study import DEVICE, TOY, Study, words

BANDWIDTH = 4.2e12  # bytes a second that an H200 was seen to read and write
CACHE = 200e6  # bytes of copies that one graph goes through, at least
IN_PLACE = ("causal_convolution", "linear_attention_prompt", "linear_attention_step", "selective_scan")
BF16 = ("rowwise", "hopper_gemm", *IN_PLACE)  # all others in float16
STORED = ("paged_attention", "latent_attention")  # found by address: a copy of the arguments has the same store
IN_ORDER = ("rowwise", *IN_PLACE, *STORED)  # the ops whose operands come from memory
# In attention below, in experts and in products; `packed_attention`, `route` and `sample` had studies that are gone;
# the reference of `packed_rows` waits for the GPU.
ELSEWHERE = (
    "attention",
    "experts",
    "fp8_linear",
    "int8_linear",
    "packed_attention",
    "packed_rows",
    "quantize_rows",
    "route",
    "sample",
)

ATTENTION_SHAPES = {  # batch, heads, queries, keys, head dimension
    "sd15-64-self": (2, 8, 4096, 4096, 40),
    "sd15-32-self": (2, 8, 1024, 1024, 80),
    "sd15-16-self": (2, 8, 256, 256, 160),
    "sd15-8-self": (2, 8, 64, 64, 160),
    "sd15-64-cross": (2, 8, 4096, 77, 40),
    "sd15-32-cross": (2, 8, 1024, 77, 80),
    "sd15-16-cross": (2, 8, 256, 77, 160),
    "sdxl-64-self": (2, 10, 4096, 4096, 64),
    "sdxl-32-self": (2, 20, 1024, 1024, 64),
    "sdxl-32-cross": (2, 20, 1024, 77, 64),
    "vae-512": (1, 1, 4096, 4096, 512),
    "vae-1024": (1, 1, 16384, 16384, 512),
}


def traffic(value: object) -> int:
    """Bytes of all tensors; of those that begin at one address, such as latents and the values in them, the most."""
    found: dict[int, int] = {}
    for tensor in tensor_leaves(value):
        found[tensor.data_ptr()] = max(tensor.nbytes, found.get(tensor.data_ptr(), 0))
    return sum(found.values())


def wide(value):
    """Arguments with their floating-point numbers, but for codes of one byte, in float64."""

    def one(leaf):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.itemsize > 1:
            return leaf.double()
        return torch.float64 if isinstance(leaf, torch.dtype) and leaf.itemsize > 1 else leaf

    return pytree.tree_map(one, value)


def error(result: object, exact: object) -> float:
    """The largest of all tensors."""
    pairs = [
        (a.double(), b.double()) for a, b in zip(tensor_leaves(result), tensor_leaves(exact), strict=True) if a.numel()
    ]
    return max(float((a - b).abs().nan_to_num().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


def op_row(op: Op, case: Case) -> dict:
    """Raises ValueError for a result that is wrong, or a case that the kernel does not take."""
    dtype = torch.bfloat16 if op.name in BF16 else torch.float16
    args, more = case.make(DEVICE, dtype)
    if (reason := op.supports(*args, **more)) is not None and not TOY:
        raise ValueError(reason)
    exact_args, exact_more = wide(case.make(DEVICE, dtype))
    given, more_given = case.make(DEVICE, dtype)  # into which some write
    exact, theirs = op.reference(*exact_args, **exact_more), op.reference(*given, **more_given)
    theirs, found = pytree.tree_map(lambda leaf: leaf.clone() if torch.is_tensor(leaf) else leaf, theirs), []
    first_s = seconds(lambda: found.append(op.triton(*args, **more)), DEVICE)
    row = {"error": error(found[0], exact), "torch_error": error(theirs, exact), "first_call_s": round(first_s, 3)}
    equal = [
        float((a == b).float().mean()) for a, b in zip(tensor_leaves(found[0]), tensor_leaves(theirs), strict=True)
    ]
    row["same_to_the_bit"] = min(equal)
    if not row["error"] <= 2 * row["torch_error"] + 1e-6:
        raise ValueError(f"wrong by {row['error']:.1e}, torch by {row['torch_error']:.1e}")
    moved = traffic((args, more, found[0]))
    cold = op.name in IN_ORDER and not TOY
    calls = [(args, more)]
    if cold:
        again = partial(case.make, DEVICE, dtype) if op.name in STORED else partial(copy.deepcopy, (args, more))
        calls = [again() for _ in range(math.ceil(CACHE / moved) + 1)]
    runs = {"us": [partial(op.triton, *a, **m) for a, m in calls]}
    if op.name not in (*IN_PLACE, *STORED):  # whose references wait for the GPU, in no graph
        runs["torch_us"] = [partial(op.reference, *a, **m) for a, m in calls]
    row |= times_us(runs)
    limit = {"limit_us": 1e6 * moved / BANDWIDTH} if op.name in IN_ORDER else {}
    return row | limit | {"gb_s": moved / row["us"] / 1e3}


def attention_row(shape: tuple[int, ...]) -> dict:
    """By backend: microseconds and the error of a head, or why it does not take these."""
    batch, heads, queries, keys, dim = (min(one, 64) for one in shape) if TOY else shape
    packed, row = queries == keys, {"shape": shape}
    q, k, v = (
        torch.randn(batch, s, 3 if packed else 1, heads, dim, device=DEVICE).half()[:, :, 0].transpose(1, 2)
        for s in (queries, keys, keys)
    )
    exact = BACKENDS["sdpa"].run(q[:, :1].float(), k[:, :1].float(), v[:, :1].float(), None)
    for name, backend in BACKENDS.items():
        if (reason := backend.refuses(q, k, v)) is None:
            try:
                row[f"{name}_error"] = error(backend.run(q, k, v, None)[:, :1], exact)
                row[name] = time_us(partial(backend.run, q, k, v, None))
            except RuntimeError as problem:
                reason = str(problem).splitlines()[0][:80]
        if reason is not None:
            row[f"{name}_reason"] = reason
    return row


def cases(only: list[str], begins: tuple[str, ...]) -> Iterator[tuple[Op, Case]]:
    """Those of the ops of these names; small ones where there is no GPU, else the others of row programs."""
    for op in (op for op in OPS if op.name not in ELSEWHERE):
        for case in op.cases:
            sized = case.small if TOY else not (case.small and op.name in IN_ORDER)
            if (not only or op.name in only) and sized and case.name.startswith(begins or ("",)):
                yield op, case


def main(out: Path, only: str = "", begins: str = "") -> None:
    """only: names of ops, such as rowwise, or attention. begins: how the names of cases begin, such as flux,wan."""
    record = Study("ops", out, "kernels beside torch's operations", ops=[], attention=[])
    for op, case in cases(words(only), tuple(words(begins))):
        with record.attempt(op=op.name, case=case.name):
            record.add("ops", {"op": op.name, "case": case.name} | op_row(op, case))
        if not TOY:
            torch.cuda.empty_cache()
    for name, shape in ATTENTION_SHAPES.items() if "attention" in (only or "attention") else ():
        with record.attempt(case=name):
            record.add("attention", {"case": name} | attention_row(shape))
    record.save()
