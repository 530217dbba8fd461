"""One row times small weights in 8 and 4 bits, by other numbers of rows and programs than the kernel chooses.

python benchmarks/one_row.py OUT.json: a model 1024 wide (4096 inside, 1536 for queries, keys and values, a head of 8192
words in bf16, 32 layers), beside bf16; `chain_ms`: its 129 products in one CUDA graph; microseconds of each product
alone, where much more stays in the L2 cache. `off`: how far the largest result of a product is from what the kernel's
own choice gives, as a share. A rule "R-P": R rows of the weight a program, P programs a multiprocessor at once; "half":
of half the warps.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import quantized_chain
import torch
from accel_kernels import Norm
from accel_kernels.gemm.fused_linear_triton import Shape
from accel_kernels.gemm.quantized import quantized_linear_triton as kernels
from accel_kernels.warmup import warmup
from decode_chain import milliseconds
from quantized_chain import DEVICE, DTYPE, LAYERS, SIZES, Token, rand, resize

from accel.bench.machine import commit, machine, now

HIDDEN, INNER, QKV, WORDS = 1024, 4096, 1536, 8192


def rule(rows: int, programs: int, half: bool = False) -> Callable[[Shape], Shape]:
    def changed(usual: Shape) -> Shape:
        warps = max(1, usual.warps // 2) if half else usual.warps
        return usual._replace(rows=rows, warps=warps, stages=programs)

    return changed


RULES = {"chosen": lambda usual: usual, "1-8": rule(1, 8), "1-16": rule(1, 16), "2-8": rule(2, 8), "2-16": rule(2, 16)}
RULES |= {"4-4": rule(4, 4), "4-8": rule(4, 8), "1-16 half": rule(1, 16, True), "2-16 half": rule(2, 16, True)}


def measured(token: Token, first: dict[str, torch.Tensor]) -> dict[str, float]:
    """first: results of each product by the kernel's own choice; filled in the first call."""
    x = rand(1, HIDDEN)
    row = {"chain_ms": round(milliseconds(lambda: token.step(x)), 4)}
    for part, (n, k) in SIZES.items():
        ones, zeros = torch.ones(1, k, device=DEVICE, dtype=DTYPE), torch.zeros(1, n, device=DEVICE, dtype=DTYPE)
        got = token.product(part, token.layers[0], ones, zeros).float()
        wanted = first.setdefault(part, got)
        row[f"{part}_off"] = float((got - wanted).abs().max() / wanted.abs().max())
        row[f"{part}_us"] = round(1e3 * milliseconds(lambda: token.only(part, ones, zeros)) / LAYERS, 2)  # noqa: B023
    return row


def main(path: Path) -> None:
    resize(HIDDEN, INNER, QKV)
    torch.manual_seed(0)
    head, norm = rand(WORDS, HIDDEN, spread=HIDDEN**-0.5), Norm(rand(HIDDEN), None, 1e-5)
    tokens = [Token(name, head, norm) for name in ("bf16", "int8", "int4")]
    usual, found = kernels.quantized_gemv_shape, {}

    def each() -> list[tuple[Token, str]]:
        return [(token, name) for token in tokens for name in (RULES if token.name != "bf16" else ("chosen",))]

    try:
        with warmup():
            for token, name in each():
                kernels.quantized_gemv_shape = lambda *given, name=name: RULES[name](usual(*given))
                every, token.layers = token.layers, token.layers[:1]
                token.step(rand(1, quantized_chain.HIDDEN))
                token.layers = every
        first = {token.name: {} for token in tokens}
        for token, name in each():
            kernels.quantized_gemv_shape = lambda *given, name=name: RULES[name](usual(*given))
            found[f"{token.name} {name}"] = measured(token, first[token.name])
            print(token.name, name, found[f"{token.name} {name}"], flush=True)
    finally:
        kernels.quantized_gemv_shape = usual
    result = {"case": "one-row-1024", "date": now(), "commit": commit(), "machine": machine(DEVICE), "rows": found}
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    with torch.no_grad():
        main(Path(sys.argv[1]))
