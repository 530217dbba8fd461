"""What a machine's GPU is and does: its size and speed, and each kernel family beside its reference."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accel_kernels import OPS, Case, Op
from accel_kernels.autotune import race
from accel_kernels.device import Feature, card, lacks
from accel_kernels.errors import KernelRefused, set_aside
from accel_kernels.self_check import WRITTEN, difference
from accel_kernels.tolerances import BACKEND

from accel.bench.machine import now, provenance
from accel.errors import logged, out_of_memory

SIZE = 4096  # rows and columns of the products that are timed
BYTES = 2**28  # of a copy, at most; and a sixteenth of the memory
FLOAT8 = torch.float8_e4m3fn
NO_MEMORY = "too large for this GPU's memory"


def diagnose(device: torch.device, at: Callable[[str], object] = lambda step: None) -> dict[str, Any]:
    """Everything about a device as JSON has it; `card` is None for a CPU. at: is told each step.

    Where a card is replayed kernels are chosen as for that one.
    """
    half = torch.float16 if lacks(device, Feature.BFLOAT16) else torch.bfloat16
    dtype = torch.float32 if device.type != "cuda" else half
    found: dict[str, Any] = {"about": "accel doctor"} | provenance(device, dtype)
    if device.type != "cuda":
        return found | {"card": None, "bus_gb_s": {}, "products_tflops": {}, "kernels": []}
    at("memory and bus")
    speed = bandwidth(device)
    bus = {name: round(rate / 1e9, 2) for name, rate in bus_rates(device)}
    at("matrix products")
    rates = dict(product_rates(device))
    known = replace(card(device), bandwidth=speed, rate=max(rates.get("float16", 0.0), rates.get("bfloat16", 0.0)))
    found |= {"card": known.to_dict(), "bus_gb_s": bus, "memory_gb_s": round(speed / 1e9, 1)}
    found["products_tflops"] = {name: round(rate / 1e12, 2) for name, rate in rates.items()}
    rows: list[dict] = []
    for op in OPS:
        at(op.name)
        rows += [examine_case(op, case, device) for case in cases_of(op)]
    return found | {"kernels": rows, "date": now()}


def _seconds(run: Callable[[], object]) -> float:
    return race([run])[0] / 1e3


def bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy within the device's memory reads and writes."""
    data = torch.empty(_most(device), dtype=torch.uint8, device=device)
    other = torch.empty_like(data)
    return 2 * data.numel() / _seconds(lambda: other.copy_(data))


def _most(device: torch.device) -> int:
    return min(BYTES, card(device).memory // 16)


def bus_rates(device: torch.device) -> Iterator[tuple[str, float]]:
    """Bytes a second to and from the host, by kind of its memory; none where the host refuses to pin."""
    data = torch.empty(_most(device), dtype=torch.uint8, device=device)
    for name, pinned in (("pageable", False), ("pinned", True)):
        with suppress(RuntimeError):
            host = torch.empty(data.numel(), dtype=torch.uint8, pin_memory=pinned)
            yield f"{name} to device", data.numel() / _seconds(partial(data.copy_, host, non_blocking=pinned))
            yield f"{name} to host", data.numel() / _seconds(partial(host.copy_, data, non_blocking=pinned))


def product_rates(device: torch.device) -> Iterator[tuple[str, float]]:
    """Operations a second of torch's own square products, by dtype; none where it has no such product."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8, FLOAT8):
        try:
            a, b = (torch.ones(SIZE, SIZE, device=device).to(dtype) for _ in range(2))
            one = torch.ones((), device=device)
            run = {torch.int8: lambda a, b: torch._int_mm(a, b.t())}.get(dtype, torch.mm)
            if dtype == FLOAT8:
                run = partial(_scaled, one)
            yield str(dtype).removeprefix("torch."), 2 * SIZE**3 / _seconds(partial(run, a, b))
        except Exception as error:  # a generation without it
            set_aside(error)


def _scaled(one: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)


def cases_of(op: Op) -> list[Case]:
    """The first small one, and the first of a size that models have."""
    return [next(case for case in op.cases if case.small), *[case for case in op.cases if not case.small][:1]]


def examine_case(op: Op, case: Case, device: torch.device) -> dict[str, Any]:
    """One case: how far its kernel and its reference are apart, and microseconds of both; or why it does not run."""
    row: dict[str, Any] = {"op": op.name, "case": case.name}
    try:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            args, more = case.make(device, dtype)
            row |= {"dtype": str(dtype).removeprefix("torch."), "outcome": op.supports(*args, **more)}
            if row["outcome"] is None:
                break
        else:
            return row
        written = op.changes or any(more.get(name) is not None for name in WRITTEN)
        same, too = case.make(device, dtype) if written else (args, more)  # weights of a model may be half of a card
        off = difference(op.triton(*args, **more), op.reference(*same, **too))
        row |= {"outcome": "agrees" if off <= BACKEND else "differs", "off": off}
        times = race([partial(op.triton, *args, **more), partial(op.reference, *same, **too)])
        row |= dict(zip(("us", "reference_us"), (round(1e3 * one, 1) for one in times), strict=True))
    except KernelRefused as refused:
        row["outcome"] = str(refused)
    except Exception as error:  # the other kernels are still worth their time
        set_aside(error)
        row["outcome"] = NO_MEMORY if out_of_memory(error) else f"failed: {logged(error)}"
    return row
