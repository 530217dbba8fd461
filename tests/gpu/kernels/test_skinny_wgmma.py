"""Products of up to 512 rows by warpgroups, on the GPU: every format, odd sizes, shared tiles, memory that was NaN."""

import pytest
import torch
from accel_kernels import Norm
from accel_kernels.device import Feature, has
from accel_kernels.gemm.quantized.quantized_linear import FP8, INT4, INT8, reference
from accel_kernels.gemm.quantized_weight import quantize_weight

from support.kernels.numbers import poisoned

pytest.importorskip("triton")

FORMATS = {
    "int8": (INT8, 0, False), "int8-zeros": (INT8, 0, True), "int8-32-zeros": (INT8, 32, True), "fp8": (FP8, 0, False),
    "int4-128": (INT4, 128, False), "int4-64": (INT4, 64, False), "int4-32": (INT4, 32, False),
    "int4-128-zeros": (INT4, 128, True), "int4-32-zeros": (INT4, 32, True), "int4-row": (INT4, 0, False),
}  # fmt: skip
# Rows of x, outputs, inputs; a scale to 128 columns divides all of them.
SIZES = [
    (1, 200, 512), (5, 300, 4096), (9, 130, 768), (17, 64, 256), (32, 200, 1280), (33, 1000, 4096), (64, 4096, 4096),
    (64, 77, 896), (32, 4096, 14336),
]  # fmt: skip


@pytest.fixture(autouse=True)
def hopper():
    if not has(torch.device("cuda"), Feature.WARPGROUPS):
        pytest.skip("for Hopper alone")


# In blocks of 128.
MANY = [(65, 200, 512), (128, 4096, 4096), (130, 1000, 2048), (257, 300, 4096), (300, 77, 896), (512, 6144, 1024)]


def rand(*size, dtype, spread=1.0):
    return torch.randn(*size, device="cuda").mul_(spread).to(dtype)


def weight(name, n, k, dtype):
    kind, group, zeros = FORMATS[name]
    return quantize_weight(
        rand(n, k, dtype=dtype, spread=k**-0.5) + (0.5 * k**-0.5 if zeros else 0), kind, group, zeros
    )


def wide(value):
    if isinstance(value, Norm):
        return Norm(*(one.float() if isinstance(one, torch.Tensor) else one for one in value))
    return value.float() if isinstance(value, torch.Tensor) else value


def judge(monkeypatch, x, given, bias, more, tile, times=3):
    """Error at most twice torch's, and the same bits every time."""
    from accel_kernels.gemm.quantized.quantized_linear_triton import quantized_linear

    truth = reference(x.float(), given, wide(bias), **{name: wide(value) for name, value in more.items()})
    theirs = (reference(x, given, bias, **more).float() - truth).abs().max()
    poisoned(monkeypatch)
    found = [quantized_linear(x, given, bias, **more, shape=tile) for _ in range(times)]
    monkeypatch.undo()
    assert (found[0].float() - truth).abs().max() <= 2 * theirs + 1e-6 * truth.abs().max()
    assert all(torch.equal(found[0], other) for other in found[1:])


def tiles(rows, format):
    from accel_kernels.gemm.quantized.tile_triton import WgmmaTile, wgmma_tile

    chosen = [wgmma_tile(rows, format, gate) for gate in (False, True)]
    return (
        *chosen,
        WgmmaTile(128, 8, 3, 2, 2),
        WgmmaTile(64, 4, 3, 3, 2),
        WgmmaTile(256, 8, 3, 2, 1),
        WgmmaTile(128, 4, 3, 2, 1),
    )


def plain(name, size, dtype, monkeypatch):
    rows, n, k = size
    more = {"residual": rand(rows, n, dtype=dtype), "scale": 0.5, "activation": "gelu_tanh" if n == 200 else None}
    bias = rand(n, dtype=dtype) if n == 1000 else None
    for tile in set(tiles(rows, name[:4])[:2]):
        judge(monkeypatch, rand(rows, k, dtype=dtype), weight(name, n, k, dtype), bias, more, tile)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_as_good_as_torch(name, size, exact, monkeypatch):
    plain(name, size, torch.bfloat16, monkeypatch)


@pytest.mark.parametrize("size", MANY, ids=str)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("gate", [False, True])
def test_many_rows(name, size, gate, exact, monkeypatch):
    (rows, n, k), dtype = size, torch.bfloat16
    more = {"residual": rand(rows, n, dtype=dtype), "scale": 0.5, "norm": Norm(rand(k, dtype=dtype), None, 1e-5)}
    if gate:
        more |= {"up": weight(name, n, k, dtype), "activation": "silu"}
    judge(monkeypatch, rand(rows, k, dtype=dtype), weight(name, n, k, dtype), rand(n, dtype=dtype), more, None)


@pytest.mark.parametrize("size", MANY, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_many_rows_by_tiles(name, size, exact, monkeypatch):
    """The kernel of other cards."""
    from accel_kernels.gemm.quantized.many_rows_triton import many_rows_tile

    (rows, n, k), dtype = size, torch.float16
    more = {"up": weight(name, n, k, dtype), "activation": "gelu"} if rows > 200 else {}
    tile = many_rows_tile(rows, n, bool(more), torch.device("cuda"))
    judge(monkeypatch, rand(rows, k, dtype=dtype), weight(name, n, k, dtype), None, more, tile)


@pytest.mark.parametrize("name", FORMATS)
def test_in_half_precision(name, exact, monkeypatch):
    plain(name, SIZES[5], torch.float16, monkeypatch)


@pytest.mark.parametrize("rows, norm", [(2, "rms"), (12, "layer"), (17, "rms"), (33, "gemma"), (64, "layer")])
@pytest.mark.parametrize(
    "tile, name", enumerate(["int8", "fp8", "int4-128", "int4-32-zeros", "int4-128-zeros", "int8-32-zeros"])
)
def test_gate_and_norm(name, rows, norm, tile, exact, monkeypatch):
    n, k, dtype = 1000, 2048, torch.bfloat16
    given = rand(k, dtype=dtype)
    chosen = {"rms": Norm(given, None, 1e-5), "gemma": Norm(given, None, 1e-6, offset=1.0)}
    chosen["layer"] = Norm(given, rand(k, dtype=dtype), 1e-5, centered=True)
    more = {"norm": chosen[norm], "up": weight(name, n, k, dtype), "activation": "silu"}
    more["up_bias"] = rand(n, dtype=dtype)
    bias = rand(n, dtype=dtype) if norm == "layer" else None
    judge(monkeypatch, rand(rows, k, dtype=dtype), weight(name, n, k, dtype), bias, more, tiles(rows, name[:4])[tile])


@pytest.mark.parametrize("rows", [33, 200])
@pytest.mark.parametrize("name", ["int8", "int4-128"])
def test_in_a_graph_over_again(name, rows, exact):
    """Tickets are zeros again in every replay, and one call's sums never reach another's."""
    from accel_kernels.gemm.quantized.quantized_linear_triton import quantized_linear

    dtype = torch.bfloat16
    x, first, second = rand(rows, 4096, dtype=dtype), weight(name, 4096, 4096, dtype), weight(name, 4096, 4096, dtype)
    tile = tiles(rows, name[:4])[0] if rows < 65 else None

    def twice(x):
        return quantized_linear(quantized_linear(x, first, shape=tile), second, shape=tile)

    twice(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = twice(x)
    for _ in range(20):
        x.copy_(rand(rows, 4096, dtype=dtype))
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, twice(x))
        wanted = reference(reference(x, first), second).float()
        assert (y.float() - wanted).abs().max() < 0.03 * wanted.abs().max()
