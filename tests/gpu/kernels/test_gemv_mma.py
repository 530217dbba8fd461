"""One row times 4-bit weights on the GPU's tensor cores: groups, gates, odd sizes, memory that was NaN, graphs."""

import pytest
import torch
from accel_kernels import Norm
from accel_kernels.device import Feature, has
from accel_kernels.gemm.quantized.quantized_linear import INT4, quantized_linear
from accel_kernels.gemm.quantized_weight import quantize_weight

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def hopper():
    if not has(torch.device("cuda"), Feature.WIDE_PRODUCTS):
        pytest.skip("for compute capability 8.0 and later")


# outputs, inputs, group, zeros, gate, norm; None: the tile that the kernel chooses
CASES = {
    "qkv": (6144, 4096, 64, False, False, True, None),
    "out, uneven": (4093, 4096, 128, False, False, False, None),
    "gate, uneven, zeros": (3001, 4096, 64, True, True, True, None),
    "down": (4096, 14336, 128, False, False, False, None),
    "groups of 32, uneven columns": (1000, 1664, 32, True, False, False, (16, 3, 1)),
    "a scale a row": (200, 640, 0, False, True, True, (8, 1, 1)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_one_row(case, dtype, as_good_as_torch, monkeypatch):
    from accel_kernels.gemm.quantized import quantized_linear_triton as kernels

    n, k, group, zeros, gate, norm, tile = case
    (kind, choose, real), *others = kernels.DISPATCH
    launched, given_tile = [], tile and kernels.GemvTile(*tile)
    row = kind, lambda *given: given_tile or choose(*given), lambda *given: launched.append(given[-2]) or real(*given)
    monkeypatch.setattr(kernels, "DISPATCH", (row, *others))

    def rand(*size, spread=1.0):
        return torch.randn(*size, device="cuda").mul_(spread).to(dtype)

    def weight():
        return quantize_weight(rand(n, k, spread=k**-0.5) + (0.5 * k**-0.5 if zeros else 0), INT4, group, zeros)

    more = {"residual": rand(1, n), "scale": 0.5} | ({"norm": Norm(rand(k), None, 1e-5)} if norm else {})
    more |= {"up": weight(), "up_bias": rand(n), "activation": "silu"} if gate else {}
    as_good_as_torch(quantized_linear, (rand(1, k), weight(), rand(n)), more, dtype)
    # A norm of float16 has another kernel, unless a tile is asked for.
    assert len(launched) == (0 if norm and dtype == torch.float16 and tile is None else 1)


def test_one_after_another_in_a_graph():
    """Programs of the next product start while those before still run: what one writes the next one reads."""
    weights = [
        quantize_weight(torch.randn(4096, 4096, device="cuda").mul_(1 / 64).bfloat16(), INT4, 64) for _ in range(6)
    ]
    x = torch.randn(1, 4096, device="cuda").bfloat16()

    def run():
        h = x
        for weight in weights:
            h = quantized_linear.triton(h, weight, residual=h)
        return h

    wanted, graph = run(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(20):
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, wanted)
