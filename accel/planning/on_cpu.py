"""What a model runs on a CPU: stock, wherever fused passes do not pay there.

What is fused saves launches and passes over a GPU's memory. A CPU has neither to save, and for a small model the Python
around each pass takes longer than the pass. So calls on a CPU run stock unless a measurement speaks against it: by a
word to the forwards where there is a GPU that the model may be moved to, else by taking them out again.
"""

import torch
from torch import nn

from accel.errors import reason_of
from accel.parallel.sharded_layers import ranks_of
from accel.patching.fast_forward import FastForward
from accel.patching.structure import placement
from accel.planning.plan import Plan
from accel.planning.stages import Row

RULE = "on a CPU"  # what the report calls it
GAIN = 0.97  # of stock's time, that is worth it; less of a gain is noise


def decide(plan: Plan) -> None:
    """Once all is applied: whether calls on a CPU run what is fused, and a row that says so for a model that is there.

    Options that are lossy are asked for by name, and a strict plan may leave nothing out: these run fused everywhere.
    """
    options = plan.options
    if options.cpu == "fuse" or options.lossy or options.strict or not isinstance(plan.root, nn.Module):
        return
    if not any(isinstance(getattr(patch, "value", None), FastForward) for patch in plan.patches):
        return
    plan.ledger.stock_on_cpu = True
    if placement(plan.root)[0].type != "cpu":
        return
    reason = _reason(plan)
    stays = plan.ledger.stock_on_cpu and not gpu_here() and not plan.prequantized and options.parallel is None
    if plan.ledger.stock_on_cpu:
        reason += "; fused where there is a GPU" if stays else "; fused once it is on a GPU"
    plan.rows.append(Row("", RULE, "skipped" if plan.ledger.stock_on_cpu else "patched", reason))
    if stays:
        # There is nowhere to move it to. Even forwards that only hand a call on cost a small model a few percent.
        plan.undo()
        plan.patches = []


def _reason(plan: Plan) -> str:
    """What calls on a CPU run, and why, once that is decided in the plan's ledger."""
    if ranks_of(plan.root) is not None:
        return "runs stock there: ranks that share a model would time it apart"
    if plan.pace is None:
        return "runs stock there, where fused passes save nothing"
    try:
        fused, stock = plan.pace(plan.root, plan.ledger)
    except Exception as error:  # a call of another form than any model here takes
        return f"runs stock there, not timed: {reason_of(error)}"
    plan.ledger.stock_on_cpu = not fused < GAIN * stock
    kind = "stock" if plan.ledger.stock_on_cpu else "fused"
    return f"runs {kind} there: {fused * 1e3:.2f} ms a token fused, {stock * 1e3:.2f} stock"


def gpu_here() -> bool:
    """Whether this process could move a model to a GPU."""
    return torch.cuda.is_available()
