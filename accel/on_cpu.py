"""What a model runs on a CPU: stock, wherever fused passes do not pay there.

What is fused saves launches and passes over a GPU's memory. A CPU has neither to save, and for a small model the Python
around each pass takes longer than the pass. So calls on a CPU run stock unless a measurement speaks against it.
"""

from torch import nn

from accel.failure import fatal, told
from accel.forward import FastForward
from accel.plan import Plan, Row
from accel.structure import placement

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
    reason = "runs stock there, where fused passes save nothing; fused once it is on a GPU"
    if plan.pace is not None:
        try:
            fused, stock = plan.pace()
        except Exception as error:  # a call of another form than any model here takes
            if fatal(error):
                raise
            reason = f"runs stock there, not timed: {told(error)}; fused once it is on a GPU"
        else:
            times = f"{fused * 1e3:.2f} ms a token fused, {stock * 1e3:.2f} stock"
            reason = f"runs stock there: {times}; fused once it is on a GPU"
            if fused < GAIN * stock:
                plan.ledger.stock_on_cpu = False
                reason = f"runs fused: {times}"
    status = "skipped" if plan.ledger.stock_on_cpu else "patched"
    plan.rows.append(Row("", RULE, status, reason))
