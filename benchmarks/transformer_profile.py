"""Where the GPU's time of one forward goes, kernel by kernel: stock beside accel, at the sizes of `accel bench`.

    python benchmarks/transformer_profile.py CASE OUT.json [--compile]

One row a kernel: which group it is in, how often it is launched, milliseconds of a call. Groups are told by the
kernels' names. `forward_ms` is the time of a call without the profiler, and what of it no kernel fills is `idle_ms`:
the GPU waits for the host. Each variant is written as soon as it is known, and one that fails is told.
"""

import argparse
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

import accel
from accel.bench.case import Case
from accel.bench.cases import CASES
from accel.bench.compiled import compiled_step
from accel.bench.machine import commit, machine, now
from accel.bench.memory import release
from accel.bench.runner import stock_twin
from accel.bench.timing import burst, synchronize
from accel.errors import told

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


def kernels(step: Callable[[int], object], device: torch.device) -> list[tuple[str, float]]:
    """Name and milliseconds of all that PROFILED calls launch; on a CPU of operations, without those inside of them."""
    on_gpu = device.type == "cuda"
    with torch.profiler.profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as profiler:
        for i in range(PROFILED):
            step(i)
        synchronize(device)
    if not on_gpu:
        return [(event.name, event.self_cpu_time_total / 1e3) for event in profiler.events()]
    launched = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    launched = [event for event in launched if not getattr(event, "is_user_annotation", False)]
    return [(event.name, (event.time_range.end - event.time_range.start) / 1e3) for event in launched]


def summary(found: list[tuple[str, float]], forward_ms: float) -> dict:
    """Groups and kernels of one call, those that take most first."""
    spent: dict[str, list[float]] = defaultdict(list)
    for name, ms in found:
        spent[name].append(ms)
    rows = [
        {
            "name": name[:NAME],
            "group": group_of(name),
            "launches": len(times) / PROFILED,
            "ms": round(sum(times) / PROFILED, 4),
        }
        for name, times in spent.items()
    ]
    rows.sort(key=lambda row: -row["ms"])
    groups = {}
    for group in dict.fromkeys(row["group"] for row in rows):
        own = [row for row in rows if row["group"] == group]
        groups[group] = {
            "launches": sum(row["launches"] for row in own),
            "ms": round(sum(row["ms"] for row in own), 4),
        }
    busy = sum(group["ms"] for group in groups.values())
    return {
        "forward_ms": round(forward_ms, 4),
        "idle_ms": round(forward_ms - busy, 4),
        "launches": sum(group["launches"] for group in groups.values()),
        "groups": groups,
        "kernels": rows[:MOST_KERNELS],
        "kernels_left_out": max(0, len(rows) - MOST_KERNELS),
    }


def profiled(step: Callable[[int], object], device: torch.device) -> dict:
    for i in range(WARM_UP):
        step(i)
    forward_ms = statistics.median(burst(step, TIMED, device))
    return summary(kernels(step, device), forward_ms)


@torch.no_grad()
def profile_case(case: Case, device: torch.device, dtype: torch.dtype, compiler: bool, keep: Callable) -> dict:
    """The result as one dict; keep: is given it as it grows."""
    module, inputs = case.build(device, dtype), case.inputs(device, dtype)
    result = {"case": case.name, "about": case.about, "date": now(), "commit": commit(), "machine": machine(device)}
    result |= {"dtype": str(dtype).removeprefix("torch."), "variants": {}, "failed": {}}

    def plain() -> Callable[[int], object]:
        return lambda i: case.call(module, inputs[i % len(inputs)])

    def optimized() -> Callable[[int], object]:
        accel.optimize(module)
        return plain()

    variants = {"stock": plain, "accel": optimized}
    if compiler:
        twin = stock_twin(module)
        variants = {"stock": plain, "compile": lambda: compiled_step(case, twin, inputs), "accel": optimized}
    for name, prepare in variants.items():
        try:
            result["variants"][name] = profiled(prepare(), device)
        except Exception as error:
            result["failed"][name] = told(error)
        keep(result)
        release(device)
    return result


def shown(result: dict) -> str:
    lines = [f"{result['case']}: {result['about']}, {result['dtype']}"]
    for name, variant in result["variants"].items():
        lines.append(f"{name}: {variant['forward_ms']:.2f} ms, {variant['launches']:g} launches")
        lines += [f"  {row['ms']:9.3f} ms  {row['launches']:7g}  {group}" for group, row in variant["groups"].items()]
        lines.append(f"  {variant['idle_ms']:9.3f} ms           no kernel")
    lines += [f"{name} failed: {reason}" for name, reason in result["failed"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--compile", action="store_true", help="torch.compile too")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = CASES[options.case]
    dtype = (case.dtype or torch.float16) if device.type == "cuda" else torch.float32

    def keep(result: dict) -> None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")

    print(shown(profile_case(case, device, dtype, options.compile, keep)))


if __name__ == "__main__":
    main()
