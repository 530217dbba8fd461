"""Peak GPU memory of one generate() call, stock and optimised, and what its cache needs at least."""

import accel
from accel.bench.llm.cases import Work
from accel.bench.llm.models import prompt
from accel.bench.llm.turns import Variant
from accel.bench.memory import peak_mb


def row(work: Work, optimised: Variant, batch: int) -> dict:
    """MiB at the peak, weights included; kv_mb: keys and values of every token of the call. None on a CPU.

    optimised: is stock meanwhile, and optimised afterwards.
    """
    context = work.contexts[0]
    inputs = prompt(work.stock, batch, context)

    def call() -> None:
        optimised.generate(inputs, work.many)

    def first() -> None:
        accel.optimize(optimised.model)
        call()

    accel.restore(optimised.model)
    try:
        stock = peak_mb(work.device, call, call)
        ours = peak_mb(work.device, first, call)
    finally:
        accel.optimize(optimised.model)
    return {
        "batch": batch,
        "context": context,
        "new tokens": work.many,
        "stock": stock,
        "accel": ours,
        "kv_mb": round(work.traffic.cache(batch, context + work.many) / 2**20, 3),
        "weights_mb": round(sum(p.nbytes for p in work.stock.parameters()) / 2**20, 1),
    }
