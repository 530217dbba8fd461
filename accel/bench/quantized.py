"""A case with quantized weights: exact over the weights it has, and how far those put it from stock."""

import torch
from torch import nn

import accel
from accel.bench import accuracy
from accel.bench.case import Case
from accel.planning.plan import PLAN
from accel.verification.metrics import Quality, compare
from accel.verification.precision import finer, upcast
from accel.verification.rounded_products import judge


def over_the_same_weights(
    case: Case, module: nn.Module, inputs: list[dict], dtype: torch.dtype, exact: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs of stock code over the quantized weights: in the module's dtype, the last `exact` in full precision."""
    with vars(module)[PLAN].unfused():
        outputs = [case.call(module, kwargs) for kwargs in inputs]
        if not exact:
            return outputs, []
        return outputs, accuracy.in_full(case, upcast(module, finer(dtype)), inputs[-exact:], dtype)


def products(case: Case, module: nn.Module, given: dict) -> dict[str, Quality]:
    """Rows rounded to 8 bits and what is multiplied with them, each judged by itself in one call."""
    return judge(module, lambda: case.call(module, given))


def weight_loss(module: nn.Module, outputs: list[torch.Tensor], stock: list[torch.Tensor]) -> dict:
    """What rounding the weights costs and saves, for the result."""
    quality, rows = compare(stock, outputs), accel.report(module).weights
    before, after = (sum(row[name] for row in rows) for name in ("bytes_before", "bytes_after"))
    rest = sum(p.nbytes for p in module.parameters())
    return {
        "psnr_db": quality.to_dict()["psnr_db"],
        "relative_rms": quality.relative_rms,
        "linears": len(rows),
        "least_sqnr_db": min(row["sqnr_db"] for row in rows),
        "weights_mb": {"stock": round((rest + before) / 2**20, 1), "accel": round((rest + after) / 2**20, 1)},
    }
