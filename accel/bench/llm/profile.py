"""Where the time of a decode step goes, beside the least that its bytes would take at the speed of the memory."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

import accel
from accel.bench.llm.cases import Work
from accel.bench.llm.models import beside, prompt
from accel.bench.llm.ranges import MARK, PREFIX, REST, Ranges
from accel.bench.llm.traffic import ROLES, Traffic, copy_bandwidth
from accel.bench.llm.variants import Variant
from accel.bench.machine import commit, machine, now
from accel.bench.timing import burst, synchronize
from accel.libraries.cache import cache_given, cache_of

WARM_UP, STEPS, TIMED = 5, 6, 40
ROUNDS, TOKENS = 3, 32  # generate() calls, and tokens between a short and a long one
MOST_KERNELS = 20


@dataclass(frozen=True)
class Kernel:
    """One launch on the GPU, or one operation on a CPU; role None where it is not known yet."""

    name: str
    us: float
    role: str | None = None


class Steps:
    """Decode steps of a model one after another, each a call of its forward on the cache of a prompt."""

    def __init__(self, model: nn.Module, rows: int, context: int):
        self.model = model
        inputs = prompt(model, rows, context)
        self.token = inputs["input_ids"][:, -1:].clone()
        self.cache = cache_of(model(**inputs, use_cache=True, logits_to_keep=1))

    def __call__(self, *_: object) -> None:
        given = cache_given(type(self.model).forward, self.cache)
        self.cache = cache_of(self.model(input_ids=self.token, use_cache=True, **given))


@torch.no_grad()
def profile(model: nn.Module, device: torch.device, rows: int, context: int, *, stock: bool = False) -> dict:
    """The result as one dict, ready for JSON: rows of {"part", "ms", "launches", "mb", "least_ms"}, and kernels.

    model: not optimized; it is so afterwards unless `stock` is asked for. step_ms is the time of a step by the clock,
    token_ms that of a token written by generate(), bound_ms the least the bytes of a step can take.
    """
    plain = beside(model)
    traffic = Traffic.of(plain)
    bandwidth = copy_bandwidth(device)
    if not stock:
        accel.optimize(model, graphs=False)
    known = _kernels(model, device, rows, context, Ranges(model, traffic.products))
    if not stock:
        accel.optimize(model)
    timed = Steps(model, rows, context)
    for _ in range(WARM_UP):
        timed()
    times = sorted(burst(timed, TIMED, device))
    kernels = known if stock or device.type != "cuda" else _assigned(_kernels(model, device, rows, context), known)
    moved = traffic.step(rows, context)
    work = Work(plain, traffic, bandwidth, device, (rows,), (context,), TOKENS, 0)
    variant, inputs = Variant("stock" if stock else "accel", model), prompt(model, rows, context)
    token_s = statistics.median(work.steps(variant, inputs)["step"] for _ in range(ROUNDS))
    return {
        "about": f"one decode step, batch {rows}, context {context}, {variant.name}",
        "date": now(),
        "commit": commit(),
        "machine": machine(device),
        "copy_bandwidth_gb_s": round(bandwidth / 1e9, 1),
        "step_ms": round(times[len(times) // 2], 4),
        "token_ms": round(token_s * 1e3, 4),
        "bound_ms": round(sum(moved.values()) / bandwidth * 1e3, 4),
        "rows": _parts(kernels, moved, bandwidth),
        "kernels": _by_name(kernels),
        "fallbacks": accel.report(model).to_dict()["fallbacks"],
    }


def _parts(kernels: list[Kernel], moved: dict[str, int], bandwidth: float) -> list[dict]:
    spent = _spent((kernel.role or REST, kernel.us) for kernel in kernels)
    return [
        {
            "part": role,
            "ms": round(sum(spent[role]) / STEPS / 1e3, 4),
            "launches": round(len(spent[role]) / STEPS, 1),
            "mb": round(moved[role] / 1e6, 3),
            "least_ms": round(moved[role] / bandwidth * 1e3, 4),
        }
        for role in ROLES
        if spent[role] or moved[role]
    ]


def _by_name(kernels: list[Kernel]) -> list[dict]:
    spent = _spent((kernel.name, kernel.us) for kernel in kernels)
    names = sorted(spent, key=lambda name: -sum(spent[name]))[:MOST_KERNELS]
    return [
        {"name": name[:90], "us": round(sum(spent[name]) / STEPS, 2), "launches": len(spent[name]) / STEPS}
        for name in names
    ]


def _spent(times: Iterable[tuple[str, float]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for name, us in times:
        found[name].append(us)
    return found


def _kernels(
    model: nn.Module, device: torch.device, rows: int, context: int, ranges: Ranges | None = None
) -> list[Kernel]:
    """What ran in STEPS steps, in order; with ranges, each with its role."""
    steps = Steps(model, rows, context)
    for _ in range(WARM_UP):
        steps()
    with ranges or nullcontext():
        events = profile_events(lambda _: steps(), STEPS, device)
    return launches(events, ranges.order if ranges else []) if device.type == "cuda" else operations(events)


def profile_events(step: Callable[[int], object], calls: int, device: torch.device) -> Any:
    """What torch's profiler sees of so many calls."""
    synchronize(device)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with torch.profiler.profile(activities=activities) as profiler:
        for i in range(calls):
            step(i)
        synchronize(device)
    return profiler.events()


def launches(events: Any, order: Sequence[str] = ()) -> list[Kernel]:
    """Launches by start; those between the two marks of a range have its role, by the order of ranges."""
    launched = [e for e in events if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)]
    launched = sorted((e for e in launched if not e.name.startswith(PREFIX)), key=lambda e: e.time_range.start)
    marks = sum(MARK in event.name for event in launched)
    roles = iter(order if marks == 2 * len(order) else [])  # else some were lost
    found, role, inside = [], None, False
    for event in launched:
        if MARK in event.name:
            inside = not inside
            role = next(roles, None) if inside else None
        else:
            found.append(Kernel(event.name, event.time_range.end - event.time_range.start, role))
    return found


def operations(events: Any) -> list[Kernel]:
    """Operations by their own time, with the role of the range they are in."""
    found = []
    for event in (event for event in events if not event.name.startswith(PREFIX)):
        role, parent = None, event
        while parent is not None and role is None:
            role = parent.name.removeprefix(PREFIX) if parent.name.startswith(PREFIX) else None
            parent = parent.cpu_parent
        found.append(Kernel(event.name, event.self_cpu_time_total, role))
    return found


def _assigned(replayed: list[Kernel], known: list[Kernel]) -> list[Kernel]:
    """Launches of a graph, which has no ranges, with the roles that the same launches had when they ran one by one.

    The n-th launch of a kernel is the n-th there. Where their numbers differ, each takes the role its kernel has most.
    """
    roles = defaultdict(list)
    for kernel in known:
        roles[kernel.name].append(kernel.role)
    count = Counter(kernel.name for kernel in replayed)
    most = {name: Counter(found).most_common(1)[0][0] for name, found in roles.items()}
    turn = {name: iter(found) for name, found in roles.items() if len(found) == count[name]}
    return [
        Kernel(kernel.name, kernel.us, next(turn[kernel.name]) if kernel.name in turn else most.get(kernel.name))
        for kernel in replayed
    ]
