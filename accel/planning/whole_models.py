"""Whether a model is faster fused as a whole: on a CPU, and on a GPU if only some layers are fused, without a graph.

Fusing saves launches and passes over a GPU's memory. On a CPU, for a small model, the Python around each pass takes
longer than the pass. So calls on a CPU run stock unless a measurement says otherwise. If there is a GPU that the model
may be moved to, the forwards stay and pass calls on; else they are taken out.

On a GPU a step without a graph takes as long as the host. Lone sites were timed before, see `sites`; layers between
stock ones are timed in a whole step.
"""

from dataclasses import replace

import torch
from torch import nn

from accel.cuda_graphs.pays import clearly_faster
from accel.errors import reason_of
from accel.parallel.sharded_layers import ranks_of
from accel.patching.fast_forward import FastForward
from accel.patching.rule import StayingPatch
from accel.patching.structure import placement
from accel.planning.plan import Plan, Row
from accel.planning.sites import WOULD_NOT

ON_CPU = "on a CPU"  # what the report calls it


def decide(plan: Plan) -> None:
    """Once all is applied: decides whether calls run fused, and adds a row to the report.

    Plans with lossy options, which are asked for by name, and strict ones run fused everywhere.
    """
    options = plan.options
    if options.lossy or options.strict or options.memory is not None or not isinstance(plan.root, nn.Module):
        return
    values = (getattr(patch, "value", None) for patch in plan.patches)
    forwards = [value for value in values if isinstance(value, FastForward)]
    if not forwards:
        return
    device = placement(plan.root)[0].type
    if device == "cuda" and not any(forward.captures for forward in forwards):
        _decide_on_gpu(plan)
    if options.cpu == "fuse":
        return
    plan.log.stock_on_cpu = True
    if device != "cpu":
        return
    reason = _reason(plan)
    stays = plan.log.stock_on_cpu and not gpu_here() and not plan.prequantized and options.parallel is None
    if plan.log.stock_on_cpu:
        reason += "; fused where there is a GPU" if stays else "; fused once it is on a GPU"
    plan.rows.append(Row("", ON_CPU, "skipped" if plan.log.stock_on_cpu else "patched", reason))
    if stays:
        # There is no GPU to move it to. Forwards that only pass calls on would cost a small model a few percent.
        _take_out(plan)


def _decide_on_gpu(plan: Plan) -> None:
    """For a model that was understood in part, and not quantized: keeps all patches, or none."""
    if plan.pace is None or plan.prequantized or ranks_of(plan.root) is not None:
        return
    try:
        fused, stock = plan.pace(plan.root, plan.log)
    except Exception as error:  # a call of another form than any model here takes: its sites pay one by one
        reason_of(error)
        return
    if clearly_faster(fused, stock):
        return
    _take_out(plan)
    reason = f"{WOULD_NOT}: {_told(fused, stock)}"
    plan.rows = [replace(row, status="skipped", reason=reason) if row.status == "patched" else row for row in plan.rows]


def _take_out(plan: Plan) -> None:
    plan.undo()
    plan.patches = [patch for patch in plan.patches if isinstance(patch, StayingPatch)]
    plan.apply()


def _reason(plan: Plan) -> str:
    """Decides in the plan's log what calls on a CPU run, and says why."""
    if ranks_of(plan.root) is not None:
        return "runs stock there: ranks that share a model would time it apart"
    if plan.pace is None:
        return "runs stock there, where fused passes save nothing"
    try:
        fused, stock = plan.pace(plan.root, plan.log)
    except Exception as error:  # a call of another form than any model here takes
        return f"runs stock there, not timed: {reason_of(error)}"
    plan.log.stock_on_cpu = not clearly_faster(fused, stock)
    kind = "stock" if plan.log.stock_on_cpu else "fused"
    return f"runs {kind} there: {_told(fused, stock)}"


def _told(fused: float, stock: float) -> str:
    return f"{fused * 1e3:.2f} ms a token fused, {stock * 1e3:.2f} stock"


def gpu_here() -> bool:
    """Whether this process could move a model to a GPU."""
    return torch.cuda.is_available()
