"""Peak GPU memory of one generate() call, stock and optimized, and what its cache needs at least."""

import accel
from accel.bench.llm.cases import Work
from accel.bench.llm.interleaved import Variant
from accel.bench.llm.models import prompt
from accel.bench.memory import peak_mb


def memory_row(work: Work, optimized: Variant, batch: int) -> dict:
    """MiB at the peak, weights included; kv_mb: keys and values of every token of the call. None on a CPU.

    optimized: is stock meanwhile, and optimized afterwards.
    """
    context = work.contexts[0]
    inputs = prompt(work.stock, batch, context)

    def call() -> None:
        optimized.generate(inputs, work.many)

    def first() -> None:
        accel.optimize(optimized.model)
        call()

    accel.restore(optimized.model)
    try:
        stock = peak_mb(work.device, call, call)
        ours = peak_mb(work.device, first, call)
    finally:
        accel.optimize(optimized.model)
    return {
        "batch": batch,
        "context": context,
        "new tokens": work.many,
        "stock": stock,
        "accel": ours,
        "kv_mb": round(work.traffic.cache(batch, context + work.many) / 2**20, 3),
        "weights_mb": round(sum(p.nbytes for p in work.stock.parameters()) / 2**20, 1),
    }
