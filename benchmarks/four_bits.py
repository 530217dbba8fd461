"""Products of a token with weights of 4 bits, in groups of 64 and of 128, of the shapes of several models.

python benchmarks/four_bits.py OUT.json [--tiles] [--shapes ...] [--rows ...]: every kernel against float32 first; then
microseconds of each product, over distinct weights in one CUDA graph, and milliseconds of all products of a token,
beside bf16 and int8. The head is in bf16. --tiles: other tiles than the chosen ones too.
"""

import argparse
import json
import time
from pathlib import Path

import quantized_chain
import torch
from accel_kernels import Norm, quantized_linear
from accel_kernels.gemm.quantized.gemv_mma_triton import GemvTile, parts_of, steps_of
from accel_kernels.gemm.quantized.quantized_linear import INT4
from accel_kernels.gemm.quantized.tile_triton import WgmmaTile
from accel_kernels.warmup import warmup
from decode_chain import milliseconds
from quantized_chain import DEVICE, FORMATS, SIZES, Token, rand, resize, weight

from accel.bench.machine import commit, machine, now

# Hidden and inner width, outputs for queries, keys and values, words of the vocabulary, layers.
SHAPES = {"llama-8b": (4096, 14336, 6144, 128256, 32), "qwen3-8b": (4096, 12288, 6144, 151936, 36)}
FORMATS["int4-g64"] = (INT4, 64)
LAYERS = 12  # distinct weights of each product: many times the L2 cache


def tiles(part: str, rows: int, group: int) -> list[GemvTile | WgmmaTile]:
    """Other tiles than the chosen one."""
    if rows > 1:
        return [WgmmaTile(64, 4, 5, 2, 4)] if group < 128 else []
    k = SIZES[part][1]
    found = [GemvTile(*one) for one in ((4, 4, 4), (4, 3, 4), (8, 4, 2), (8, 3, 2), (16, 4, 1), (16, 6, 1))]
    return [tile for tile in found if steps_of(k, tile.warps) * parts_of(k, k // group) <= 8]


def judge(name: str, part: str, rows: int):
    """A function of a tile: the largest error against float32 and torch's, as shares of the largest result."""
    n, k = SIZES[part]
    more = {"norm": Norm(rand(k), None, 1e-5)} if part in ("qkv", "gate") else {"residual": rand(rows, n - 3)}
    x, given = rand(rows, k), weight(name, n - 3, k)
    if part == "gate":
        more |= {"up": weight(name, n - 3, k), "activation": "silu"}
    op, wide = quantized_linear, {}
    for key, one in more.items():
        wide[key] = one.float() if isinstance(one, torch.Tensor) else one
    if "norm" in more:
        wide["norm"] = Norm(more["norm"].weight.float(), None, 1e-5)
    truth = op.reference(x.float(), given, None, **wide)
    peak, empty = truth.abs().max(), torch.empty
    theirs = float((op.reference(x, given, None, **more).float() - truth).abs().max() / peak)

    def poisoned(*size, **how):
        made = empty(*size, **how)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    def errors(**shape) -> dict[str, float]:
        torch.empty = poisoned
        try:
            ours = op.triton(x, given, None, **more, **shape).float()
        finally:
            torch.empty = empty
        return {"ours": float((ours - truth).abs().max() / peak), "torch": theirs}

    return errors


def every(token: Token, part: str, rows: int, more: bool) -> list[dict]:
    """The arguments that name a tile: none for the chosen one."""
    given = [{}]
    if more and token.name.startswith("int4"):
        given += [{"shape": tile} for tile in tiles(part, rows, FORMATS[token.name][1])]
    return given


def products(token: Token, shape: str, rows: int, more: bool, say) -> list[dict]:
    """Microseconds of each product, by the chosen kernel and by others."""
    found = []
    for part, (n, k) in SIZES.items():
        x, residual = rand(rows, k), rand(rows, n)
        errors = None if token.name == "bf16" else judge(token.name, part, rows)
        for given in every(token, part, rows, more):
            tile = given.get("shape")
            row = {"shape": shape, "format": token.name, "rows": rows, "part": part}
            row |= {"kernel": type(tile).__name__, "tile": list(tile)} if tile else {}
            try:
                ms = milliseconds(lambda: token.only(part, x, residual, **given))  # noqa: B023 (run at once)
                row |= {"us": round(ms / LAYERS * 1e3, 2), "tb_per_s": round(token.bytes[part] / ms / 1e9, 2)}
                row |= errors(**given) if errors else {}
            except Exception as failure:  # a tile that needs more than the card has
                row["failed"] = str(failure)[:100]
            found.append(row)
            say(row)
    return found


def warm_up(token: Token, rows: int, more: bool) -> None:
    for part, (n, k) in SIZES.items():
        for given in every(token, part, rows, more):
            token.product(part, token.layers[0], rand(rows, k), rand(rows, n), **given)


def main(path: Path, shapes: list[str], formats: list[str], rows: list[int], more: bool) -> None:
    begun = time.monotonic()
    quantized_chain.LAYERS = LAYERS

    def say(row):
        print(round(time.monotonic() - begun, 1), *row.values(), flush=True)

    parts, chains = [], []
    for shape in shapes:
        hidden, inner, qkv, words, layers = SHAPES[shape]
        resize(hidden, inner, qkv)
        head, norm = rand(words, hidden, spread=hidden**-0.5), Norm(rand(hidden), None, 1e-5)
        tokens = [Token(name, head, norm) for name in ("bf16", *formats)]
        with warmup():
            for token in tokens:
                for count in rows:
                    warm_up(token, count, more)
        for token in tokens:
            for count in rows:
                parts += products(token, shape, count, more, say)
        for token in tokens:
            own, token.layers = token.layers, (token.layers * layers)[:layers]
            for count in rows:
                x = rand(count, hidden)
                ms = milliseconds(lambda: token.step(x))  # noqa: B023 (run at once)
                chains.append({"shape": shape, "format": token.name, "rows": count, "products_ms": ms})
                say(chains[-1])
            token.layers = own
    for row in parts:
        if not row.get("ours", 0.0) <= 2 * row.get("torch", 0.0) + 1e-6:
            print("WRONG", row, flush=True)
    about = "products of a token, head in bf16, one CUDA graph; int4: groups of 128; us: of a product by itself"
    result = {"case": "four-bits", "about": about, "date": now(), "commit": commit(), "machine": machine(DEVICE)}
    path.write_text(json.dumps(result | {"rows": chains, "products": parts}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--formats", nargs="+", default=["int8", "int4", "int4-g64"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16])
    parser.add_argument("--tiles", action="store_true")
    given = parser.parse_args()
    with torch.no_grad():
        main(given.out, given.shapes, given.formats, given.rows, given.tiles)
