"""What each mechanism gives: the same model timed with all of them, then with all but one, in one process.

Milliseconds do not add up: what one mechanism leaves undone another may partly take over.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from accel_kernels.attention.backends import AttentionChooser
from accel_kernels.gemm.linear import torch_linear
from torch import nn

from accel.bench.memory import allocated_bytes
from accel.bench.timing import burst, seconds
from accel.diffusion.family import RULES, graph_paths
from accel.fusion.loop import DenoisingLoop, ForwardCounter
from accel.options import Options
from accel.patching.fast_forward import Kernels
from accel.patching.rule import Context
from accel.planning.plan import Plan, create_context

WARM_UP = 4  # calls: eager, captured, replayed, and once more


@dataclass(frozen=True)
class Mechanism:
    """Something that can be left out: options, rules by name, or a change of what a plan's sites work with.

    needs: rules of which at least one must have found a site, or there is nothing to leave out.
    """

    name: str
    options: Options = Options()
    rules: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    before: Callable[[Context], None] = lambda context: None
    after: Callable[[Context], None] = lambda context: None


def _kernels(**changed: Callable[[Kernels], Any]) -> Callable[[Context], None]:
    def change(context: Context) -> None:
        context.kernels = replace(context.kernels, **{name: make(context.kernels) for name, make in changed.items()})

    return change


def _no_channel_stats(kernels: Kernels) -> Callable:
    return lambda *args, **kwargs: kernels.image_sum(*args, **{**kwargs, "channel_stats": False})


def _no_loop(context: Context) -> None:
    context.of(DenoisingLoop).forget()


def _each_alone(context: Context) -> None:
    if (passes := context.find(ForwardCounter)) is not None:
        passes.tracked = False


MECHANISMS = (
    Mechanism("CUDA graph", Options(graphs=False)),
    Mechanism("channels-last layout, with the blocks that need it", Options(layout="keep")),
    Mechanism("resnet block", rules=("resnet block",)),
    Mechanism("transformer stack and block", rules=("transformer stack", "transformer block")),
    Mechanism("attention, projections in one product", rules=("attention",)),
    Mechanism(
        "attention backend by measuring",
        needs=("attention",),
        before=_kernels(attention=lambda kernels: AttentionChooser("sdpa")),
    ),
    Mechanism("fused group norm", before=_kernels(group_norm=lambda kernels: kernels.group_norm.reference)),
    Mechanism(
        "fused layer norm",
        needs=("transformer block", "layer norm"),
        before=_kernels(layer_norm=lambda kernels: kernels.layer_norm.reference),
    ),
    Mechanism(
        "GEGLU in its product",
        needs=("transformer block",),
        before=_kernels(linear_geglu=lambda kernels: kernels.linear_geglu.instead),
    ),
    Mechanism(
        "upsampling in its convolution",
        needs=("resampling",),
        before=_kernels(upsample_convolve=lambda kernels: kernels.upsample_convolve.instead),
    ),
    Mechanism(
        "moments taken while writing, skip connections too",
        needs=("resnet block",),
        before=_kernels(image_sum=_no_channel_stats, image_concat=lambda kernels: kernels.image_concat.reference),
    ),
    Mechanism("products by the fastest of cuBLASLt's algorithms", before=_kernels(linear=lambda kernels: torch_linear)),
    Mechanism(
        "time and prompt projections together, prompt's once a loop",
        needs=("transformer block",),
        before=_no_loop,
        after=_each_alone,
    ),
    Mechanism("biases of single convolutions", rules=("convolution",)),
)


def ablate(
    model: nn.Module, call: Callable[[], object], budget_s: float = 0.5, at: Callable[[str], None] = lambda name: None
) -> Iterator[dict]:
    """Rows {"without", "ms", "gain_ms", "peak_mb"}: first stock, then with everything, then without each mechanism.

    model: not optimized; as it was afterwards. call: one forward of it. A mechanism of which no site is in the model
    gives no row. "peak_mb" is what calls and capture need on top of the weights; None on a CPU.
    """
    device = next(model.parameters()).device
    at("stock")
    stock = _timed(call, device, budget_s)
    yield {"without": "stock", **stock, "gain_ms": None}
    whole: dict | None = None
    sites: set[str] = set()
    for mechanism in (None, *MECHANISMS):
        at(mechanism.name if mechanism else "everything")
        wanted = mechanism and (mechanism.needs or mechanism.rules)
        if wanted and not sites.intersection(wanted):
            continue
        plan, context = _plan(model, mechanism or Mechanism("nothing"))
        plan.apply()
        try:
            if whole is None:
                sites = {row.rule for row in plan.rows if row.status == "patched"}
            if mechanism is not None:
                mechanism.after(context)
            row = _timed(call, device, budget_s)
        finally:
            plan.undo()
        whole = whole or row
        gain = None if mechanism is None else round(row["ms"] - whole["ms"], 4)
        yield {"without": mechanism.name if mechanism else "nothing", **row, "gain_ms": gain}


def _plan(model: nn.Module, mechanism: Mechanism) -> tuple[Plan, Context]:
    context = create_context(mechanism.options)
    context.of(DenoisingLoop).begin()  # as in a pipeline's loop, where the prompt stays the same
    mechanism.before(context)
    context.graph_paths = graph_paths(model)
    return Plan(model, [rule for rule in RULES if rule.name not in mechanism.rules], context), context


@torch.no_grad()
def _timed(call: Callable[[], object], device: torch.device, budget_s: float) -> dict:
    before = allocated_bytes(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(WARM_UP):
        call()
    each = seconds(call, device)
    calls = max(3, min(100, int(budget_s / max(each, 1e-6))))
    times = sorted(burst(lambda i: call(), calls, device))
    peak = (torch.cuda.max_memory_allocated(device) - before) / 2**20 if device.type == "cuda" else None
    return {"ms": round(times[len(times) // 2], 4), "peak_mb": None if peak is None else round(peak, 1)}
