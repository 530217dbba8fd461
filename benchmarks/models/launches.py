"""Where a GPU's time of one forward goes, kernel by kernel: stock beside accel, at the sizes of `accel bench`.

One row a kernel: which group it is in, how often it is launched, milliseconds of a call. Groups are told by the
kernels' names. `forward_ms` is the time of a call without the profiler, and what of it no kernel fills is `idle_ms`:
the GPU waits for the host. One variant that fails is told.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

import accel
from accel.bench.compiled import compiled_step
from accel.bench.diffusion.case import Case
from accel.bench.diffusion.cases import CASES
from accel.bench.diffusion.runner import stock_twin
from accel.bench.memory import release
from accel.bench.timing import synchronize
from benchmarks.study import DEVICE, Study, steady_ms

WARM_UP, TIMED, PROFILED = 4, 5, 2
MOST_KERNELS = 60
NAME = 160  # letters of a kernel's name that are kept
REST = "norm and elementwise"
# The first whose pattern is in the name. Of the compiler's kernels the prefix says what they are; their names list all
# that they took in.
GROUPS = (
    ("GEMM", r"^triton_tem_"),
    (REST, r"^triton_(poi|red|per|for|mix)_"),
    ("attention", r"flash|fmha|sdpa|attention|attn"),
    ("convolution", r"conv|fprop|nchw|nhwc"),
    ("copies", r"memcpy|memset|copy|catarray|^aten::(cat|contiguous|clone|fill_|to)$"),
    ("GEMM", r"gemm|gemv|nvjet|cutlass|cublas|splitk|wgmma|s16816|linear|addmm|skinny|aten::(bmm|mm|matmul)"),
)


def group_of(name: str) -> str:
    return next((group for group, pattern in GROUPS if re.search(pattern, name, re.IGNORECASE)), REST)


def profiled(step: Callable[[int], object], device: torch.device) -> list[tuple[str, float]]:
    """Name and milliseconds of all that PROFILED calls launch; on a CPU of operations, without those inside of them."""
    synchronize(device)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with torch.profiler.profile(activities=activities) as profiler:
        for i in range(PROFILED):
            step(i)
        synchronize(device)
    if device.type != "cuda":
        return [(event.name, event.self_cpu_time_total / 1e3) for event in profiler.events()]
    launched = (event for event in profiler.events() if event.device_type == DeviceType.CUDA)
    launched = (event for event in launched if not getattr(event, "is_user_annotation", False))
    return [(event.name, (event.time_range.end - event.time_range.start) / 1e3) for event in launched]


def summary(found: list[tuple[str, float]], forward_ms: float) -> dict:
    """Groups and kernels of one call, those that take most first."""
    spent: dict[str, list[float]] = defaultdict(list)
    for name, ms in found:
        spent[name].append(ms)
    rows = [{"name": name[:NAME], "group": group_of(name)} | _sums(times, len(times)) for name, times in spent.items()]
    rows.sort(key=lambda row: -row["ms"])
    groups = {}
    for group in dict.fromkeys(row["group"] for row in rows):
        own = [row for row in rows if row["group"] == group]
        groups[group] = {key: round(sum(row[key] for row in own), 4) for key in ("launches", "ms")}
    busy = sum(group["ms"] for group in groups.values())
    return {
        "forward_ms": round(forward_ms, 4),
        "idle_ms": round(forward_ms - busy, 4),
        "launches": sum(group["launches"] for group in groups.values()),
        "groups": groups,
        "kernels": rows[:MOST_KERNELS],
        "kernels_left_out": max(0, len(rows) - MOST_KERNELS),
    }


def _sums(times: list[float], launches: int) -> dict:
    return {"launches": launches / PROFILED, "ms": round(sum(times) / PROFILED, 4)}


def profile_case(case: Case, dtype: torch.dtype, compiler: bool, record: Study) -> None:
    """Into `variants` of the record."""
    module, inputs = case.build(DEVICE, dtype), case.inputs(DEVICE, dtype)
    twin = stock_twin(module) if compiler else None

    def plain() -> Callable[[int], object]:
        return lambda i: case.call(module, inputs[i % len(inputs)])

    def optimized() -> Callable[[int], object]:
        accel.optimize(module)
        return plain()

    variants = {"stock": plain, "accel": optimized}
    if compiler:
        variants = {"stock": plain, "compile": partial(compiled_step, case, twin, inputs), "accel": optimized}
    for name, prepare in variants.items():
        with record.attempt(variant=name):
            step = prepare()
            forward_ms = steady_ms(step, WARM_UP, TIMED)
            variant = record.body["variants"][name] = summary(profiled(step, DEVICE), forward_ms)
            record.show(f"{name}: {forward_ms:.2f} ms, {variant['idle_ms']:.3f} idle", variant["groups"])
        record.save()
        release(DEVICE)


def main(case: str, out: Path, compiled: bool = False) -> None:
    """case: of `accel bench`. compiled: torch.compile too."""
    chosen = CASES[case]
    dtype = (chosen.dtype or torch.float16) if DEVICE.type == "cuda" else torch.float32
    profile_case(chosen, dtype, compiled, Study(case, out, chosen.about, dtype=dtype, variants={}))
