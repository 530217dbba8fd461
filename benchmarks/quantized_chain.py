"""The products of one token of a Llama-3.1-8B shape with weights in fewer bits, in one CUDA graph, without a model.

python benchmarks/quantized_chain.py OUT.json [--sweep SECONDS] [--wgmma] [--head]: every kernel against float32 first,
then what the 129 products take for several numbers of rows beside bf16's, whose head all of them share. --head: heads
of their own instead, in 8 bits, as of weights="int8-head". --sweep: other block shapes too. --wgmma: quantized_wgmma
too, in the tile that is fastest for each product, and in one for all.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from accel_kernels import Norm, Quantized, fused_linear, quantized_linear
from accel_kernels.gemm.fused_linear_triton import Shape
from accel_kernels.gemm.quantized.quantized_linear import FP8, INT4, INT8
from accel_kernels.gemm.quantized.quantized_linear_triton import quantized_gemv_shape
from accel_kernels.gemm.quantized.skinny_mma_triton import Tile
from accel_kernels.gemm.quantized.tile_triton import WgmmaTile
from accel_kernels.warmup import warmup
from decode_chain import milliseconds

from accel.bench.machine import commit, machine, now

LAYERS, HIDDEN, INNER, QKV, WORDS = 32, 4096, 14336, 6144, 128256
ROWS = (1, 2, 8, 16, 32, 64)
FORMATS = {"int8": (INT8, 1), "int4": (INT4, 128), "fp8": (FP8, 1)}  # and columns to a scale; 1: all of them
SIZES = {"qkv": (QKV, HIDDEN), "out": (HIDDEN, HIDDEN), "gate": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16


def rand(*shape: int, spread: float = 1.0, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.empty(shape, device=DEVICE, dtype=dtype).normal_(0, spread)


def weight(name: str, n: int, k: int, zeros: bool = False, dtype: torch.dtype = DTYPE) -> torch.Tensor | Quantized:
    """Random numbers of the format, scaled so that a product of a row of ones' spread has that spread too."""
    if name == "bf16":
        return rand(n, k, spread=k**-0.5)
    kind, group = FORMATS[name]
    groups = k // group if group > 1 else 1
    spread = {INT8: 74.0, INT4: 4.6, FP8: 1.0}[kind]
    scales = (0.5 + torch.rand(n, groups, device=DEVICE)) * (k**-0.5 / spread)
    if kind == FP8:
        data = rand(n, k).to(FP8)
    elif kind == INT8:
        data = torch.randint(-127, 128, (n, k), device=DEVICE, dtype=torch.int8)
    else:
        data = torch.randint(-(2**31), 2**31, (n, k // 8), device=DEVICE, dtype=torch.int32)
    middle = torch.randint(-8, 8, (n, groups), device=DEVICE, dtype=torch.int8) if zeros else None
    return Quantized(data, scales.to(dtype), middle)


def nbytes(given: torch.Tensor | Quantized) -> int:
    return given.nbytes


class Token:
    """The products of one step; `layers` hold weights of one format, distinct for each of them."""

    def __init__(self, name: str, head: torch.Tensor | Quantized, norm: Norm):
        self.name, self.head, self.norm = name, head, norm
        self.op = fused_linear if name == "bf16" else quantized_linear.triton
        self.layers = [{k: weight(name, *SIZES[k[:4] if k != "up" else "gate"]) for k in (*SIZES, "up")}
                       for _ in range(LAYERS)]  # fmt: skip
        self.bytes = {part: sum(nbytes(layer[part]) for layer in self.layers) for part in self.layers[0]}
        self.bytes["gate"] += self.bytes.pop("up")

    def product(self, part: str, layer: dict, x: torch.Tensor, residual: torch.Tensor, **more) -> torch.Tensor:
        if part == "gate":
            more |= {"up": layer["up"], "activation": "silu"}
        if part in ("qkv", "gate"):
            return self.op(x, layer[part], norm=self.norm, **more)
        return self.op(x, layer[part], residual=residual, **more)

    def step(self, x: torch.Tensor, tiles: dict[str, WgmmaTile] | None = None) -> None:
        shapes = {part: {"shape": tiles[part]} if tiles else {} for part in SIZES}
        for layer in self.layers:
            qkv = self.product("qkv", layer, x, x, **shapes["qkv"])
            x = self.product("out", layer, qkv.view(-1)[: x.numel()].view(x.shape), x, **shapes["out"])
            gated = self.product("gate", layer, x, x, **shapes["gate"])
            x = self.product("down", layer, gated, x, **shapes["down"])
        (quantized_linear.triton if isinstance(self.head, Quantized) else fused_linear)(x, self.head)

    def only(self, part: str, x: torch.Tensor, residual: torch.Tensor, **more) -> None:
        for layer in self.layers:
            self.product(part, layer, x, residual, **more)


def error(op, args: tuple, more: dict, **shape) -> dict[str, float]:
    """Largest error against float32 as a share of torch's with the weight in the dtype of x. NaN never passes."""
    wide = {k: Norm(*(t.float() if isinstance(t, torch.Tensor) else t for t in v)) if isinstance(v, Norm) else
            v.float() if isinstance(v, torch.Tensor) else v for k, v in more.items()}  # fmt: skip
    truth = op.reference(args[0].float(), args[1], None if args[2] is None else args[2].float(), **wide)
    theirs = (op.reference(*args, **more).float() - truth).abs().max()
    empty = torch.empty

    def poisoned(*size, **how):
        made = empty(*size, **how)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    torch.empty = poisoned
    try:
        ours = (op.triton(*args, **more, **shape).float() - truth).abs().max()
    finally:
        torch.empty = empty
    return {"ours": float(ours / truth.abs().max()), "torch": float(theirs / truth.abs().max())}


def checks(report: bool = True, by_hand: bool = False) -> list[dict]:
    found = []
    for name in FORMATS:
        for dtype in (torch.bfloat16, torch.float16):
            norm = Norm(rand(HIDDEN, dtype=dtype), None, 1e-5)
            for rows, part, zeros in ((1, "qkv", False), (1, "gate", True), (1, "down", False), (3, "gate", True),
                                      (8, "down", False), (33, "qkv", False), (17, "gate", True),
                                      (64, "down", False)):  # fmt: skip
                n, k = SIZES[part]
                zeros = zeros and name == "int4"
                given = [weight(name, n - 3, k, zeros, dtype) for _ in range(2 if part == "gate" else 1)]
                more = {"norm": norm} if part != "down" else {"residual": rand(rows, n - 3, dtype=dtype)}
                if part == "gate":
                    more |= {"up": given[1], "activation": "silu"}
                x = rand(rows, k, dtype=dtype)
                about = {"format": name, "dtype": str(dtype)[6:], "rows": rows, "part": part, "zeros": zeros}
                tiles = wide_tiles(name, rows) if by_hand else []
                for tile in [None, *tiles]:
                    shape = {"shape": tile} if tile else {}
                    found.append(about | shape | error(quantized_linear, (x, given[0], None), more, **shape))
                    one = found[-1]
                    if report and not one["ours"] <= 2 * one["torch"] + 1e-6:
                        print("WRONG", one, flush=True)
    return found


def shapes(name: str, part: str, rows: int) -> list[Tile | Shape]:
    """Others than what the kernel chooses, few enough to compile within a minute; for one row of the plain kernel."""
    if rows == 1:
        usual = quantized_gemv_shape(*SIZES[part], name, part == "gate")
        found = [(2, 2, 6), (2, 4, 4), (2, 4, 6), (4, 2, 4), (4, 4, 4), (1, 2, 8), (1, 4, 6)]
        return [usual, *(usual._replace(rows=n, warps=warps, stages=stages) for n, warps, stages in found)]
    gate = part == "gate"
    if rows > 16:
        found = [(32, 4, 1), (32, 8, 1), (16, 8, 2), (16, 4, 2), (64, 4, 1), (16, 8, 1)]
    elif gate:
        found = [(16, 4, 1), (16, 4, 2), (16, 4, 3), (16, 8, 1), (16, 8, 2), (32, 4, 1), (32, 4, 2)]
    else:
        found = [(16, 8, 2), (16, 8, 4), (16, 4, 4), (32, 4, 1), (32, 4, 2), (32, 8, 1), (32, 8, 2), (16, 16, 1)]
    return [Tile(*one) for one in found]


def wide_tiles(name: str, rows: int) -> list[WgmmaTile]:
    """One or two programs to a multiprocessor; x in shared memory takes 4 bits twice what it takes 8."""
    if name == "int4" and rows > 32:
        found = [(128, 8, 3, 2, 1), (64, 4, 4, 2, 2)]
    elif rows > 32:
        found = [(128, 8, 8, 4, 1), (64, 4, 6, 3, 2)]
    elif rows > 16:
        found = [(128, 8, 8, 4, 1), (64, 4, 5, 3, 2)]
    elif name == "int4":
        found = [(128, 8, 4, 2, 2), (64, 4, 5, 2, 4)]
    else:
        found = [(128, 8, 3, 2, 3), (256, 8, 4, 4, 1)]
    return [WgmmaTile(*one) for one in found]


def by_hand(token: Token, rows: int, until: float) -> tuple[list[dict], list[dict]]:
    """Each product 32 times by `skinny_wgmma`; and the 129 with what was fastest, beside the chain's own row."""
    found, best = [], {}
    for part, (n, k) in SIZES.items():
        x, residual = rand(rows, k), rand(rows, n)
        for tile in wide_tiles(token.name, rows):
            if time.monotonic() > until and part in best:
                break
            ms = milliseconds(lambda: token.only(part, x, residual, shape=tile))  # noqa: B023 (run at once)
            us, tbs = ms / LAYERS * 1e3, token.bytes[part] / ms / 1e9
            found.append({"format": token.name, "rows": rows, "part": part, "wide": list(tile), "us": round(us, 2),
                          "tb_per_s": round(tbs, 2)})  # fmt: skip
            if part not in best or ms < best[part][0]:
                best[part] = ms, tile
            print(found[-1], flush=True)
    tiles = {part: tile for part, (_, tile) in best.items()}
    x = rand(rows, HIDDEN)
    ms = milliseconds(lambda: token.step(x, tiles))
    wholes = [{"format": token.name, "rows": rows, "products_ms": ms, "wide": {k: list(t) for k, t in tiles.items()}}]
    for tile in wide_tiles(token.name, rows):
        ms = milliseconds(lambda: token.step(x, dict.fromkeys(SIZES, tile)))  # noqa: B023 (run at once)
        wholes.append({"format": token.name, "rows": rows, "products_ms": ms, "wide": list(tile)})
    for one in wholes:
        print(one, flush=True)
    return found, wholes


def swept_rows(name: str, rows: int) -> bool:
    return name in ("int8", "int4") and rows in (1, 8, 32, 64)


def sweep(token: Token, rows: int, until: float) -> list[dict]:
    """Each product by itself, 32 times, for other block shapes."""
    found = []
    for part, (n, k) in SIZES.items():
        x, residual = rand(rows, k), rand(rows, n)
        for shape in [None, *shapes(token.name, part, rows)]:
            if time.monotonic() > until:
                return found
            try:
                ms = milliseconds(lambda: token.only(part, x, residual, shape=shape))  # noqa: B023 (run at once)
            except Exception as failure:  # a shape that needs more than the card has
                print(token.name, rows, part, shape, str(failure)[:80], flush=True)
                continue
            us, tbs = ms / LAYERS * 1e3, token.bytes[part] / ms / 1e9
            found.append({"format": token.name, "rows": rows, "part": part, "shape": shape and list(shape),
                          "us": round(us, 2), "tb_per_s": round(tbs, 2)})  # fmt: skip
    best = {}
    for one in found:
        best.setdefault(one["part"], []).append((one["us"], one["tb_per_s"], str(one["shape"] or "")))
    for part, several in best.items():
        default = next(one for one in several if not one[2])
        print(token.name, rows, part, "default", default[:2], "best", sorted(several)[:4], flush=True)
    return found


def resize(hidden: int, inner: int, qkv: int) -> None:
    """Products of another model's sizes."""
    global HIDDEN, INNER, QKV
    HIDDEN, INNER, QKV = hidden, inner, qkv
    SIZES.update({"qkv": (qkv, hidden), "out": (hidden, hidden), "gate": (inner, hidden), "down": (hidden, inner)})


def main(path: Path, seconds: float, formats: list[str], rows: list[int], wgmma: bool, own: bool) -> None:
    begun = time.monotonic()
    with warmup():
        checks(report=False, by_hand=wgmma)
    torch.cuda.synchronize()
    print("compiled", round(time.monotonic() - begun, 1), flush=True)
    torch.manual_seed(0)
    checked = checks(by_hand=wgmma)
    worst = max(checked, key=lambda one: one["ours"] / max(one["torch"], 1e-9))
    print("checked", len(checked), "worst", worst, round(time.monotonic() - begun, 1), flush=True)
    head, norm = rand(WORDS, HIDDEN, spread=HIDDEN**-0.5), Norm(rand(HIDDEN), None, 1e-5)
    heads = {name: weight("fp8" if name == "fp8" else "int8", WORDS, HIDDEN) for name in formats if own}
    tokens = {name: Token(name, heads.get(name, head), norm) for name in ("bf16", *formats)}
    found, swept, wide = [], [], []
    with warmup():
        for token in tokens.values():
            for count in rows:
                every, token.layers = token.layers, token.layers[:1]
                token.step(rand(count, HIDDEN))
                if wgmma and token.name != "bf16":
                    for part, (n, k) in SIZES.items():
                        for tile in wide_tiles(token.name, count):
                            token.only(part, rand(count, k), rand(count, n), shape=tile)
                if seconds and swept_rows(token.name, count):
                    for part, (n, k) in SIZES.items():
                        for shape in shapes(token.name, part, count):
                            token.only(part, rand(count, k), rand(count, n), shape=shape)
                token.layers = every
    print("compiled", round(time.monotonic() - begun, 1), flush=True)
    for token in tokens.values():
        for count in rows:
            x = rand(count, HIDDEN)
            ms = milliseconds(lambda: token.step(x))  # noqa: B023 (run at once)
            tbs = (sum(token.bytes.values()) + nbytes(token.head)) / ms / 1e9
            found.append({"format": token.name, "rows": count, "products_ms": ms, "tb_per_s": round(tbs, 2)})
            print(found[-1], flush=True)
    for token in tokens.values():
        for count in [count for count in rows if wgmma and token.name != "bf16"]:
            times, whole = by_hand(token, count, begun + 480)
            swept += times
            wide += whole
    for token in tokens.values():
        for count in [count for count in rows if seconds and swept_rows(token.name, count)]:
            swept += sweep(token, count, begun + seconds)
    print("done", round(time.monotonic() - begun, 1), flush=True)
    kept = "heads in 8 bits" if own else "head in bf16"
    about = f"the 129 products of a token, Llama-3.1-8B shape, {kept}, one CUDA graph; int4: groups of 128"
    result = {"case": "quantized-chain", "about": about, "date": now(), "commit": commit(), "machine": machine(DEVICE)}
    result |= {"checks": checked, "rows": found, "wgmma": wide, "sweep": swept}
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--sweep", type=float, default=0.0)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--wgmma", action="store_true")
    parser.add_argument("--sizes", nargs=3, type=int, metavar=("HIDDEN", "INNER", "QKV"))
    parser.add_argument("--head", action="store_true")
    given = parser.parse_args()
    if given.sizes:
        resize(*given.sizes)
    with torch.no_grad():
        main(given.out, given.sweep, given.formats, given.rows, given.wgmma, given.head)
