"""The product by specialized warps on a Hopper GPU: every epilogue, odd sizes, strides, memory that was NaN, graphs.

Barriers that are wrong hang: the first test runs the smallest product in a process that is given a minute, and where it
fails none of the others runs.
"""

import subprocess
import sys
from functools import partial

import pytest
import torch
from accel_kernels import Quantized, QuantizedRows, fp8_linear, hopper_gemm, quantize_rows
from accel_kernels.device import Feature, has
from accel_kernels.product_cases import product_case

pytest.importorskip("triton")
from accel_kernels.gemm.hopper import hopper_gemm_triton

FP8 = torch.float8_e4m3fn

SMALLEST = """
import torch
from accel_kernels import hopper_gemm
for m, n, k in ((8, 8, 64), (128, 256, 128), (300, 264, 200), (2000, 4104, 640)):
    x, w = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16() * k**-0.5
    assert hopper_gemm.supports(x, w) is None
    found, wanted = hopper_gemm.triton(x, w), x.double() @ w.double().t()
    assert float((found.double() - wanted).abs().max()) < 0.05, (m, n, k)
print("right")
"""


@pytest.fixture(scope="module", autouse=True)
def hopper():
    if not has(torch.device("cuda"), Feature.WARPGROUPS):
        pytest.skip("for Hopper alone")
    try:
        done = subprocess.run([sys.executable, "-c", SMALLEST], capture_output=True, text=True, timeout=90, check=False)
    except subprocess.TimeoutExpired:
        pytest.exit("the smallest product of hopper_gemm hangs", returncode=3)
    if "right" not in done.stdout:
        pytest.exit(f"the smallest product of hopper_gemm fails: {done.stderr[-3000:]}", returncode=3)


def rand(*size, dtype=torch.bfloat16, spread=1.0):
    return torch.randn(*size, device="cuda").mul_(spread).to(dtype)


def quantized(n, k, kind, dtype=torch.bfloat16):
    rows = quantize_rows.reference(rand(n, k, spread=k**-0.5), dtype=kind)
    return Quantized.of(rows.data, rows.scales.to(dtype))


def checked(as_good, args, given, dtype=torch.bfloat16):
    """Three runs: a race would show in one of them."""
    assert hopper_gemm.supports(*args, **given) is None
    for _ in range(3):
        as_good(hopper_gemm, args, given, dtype)


# rows, outputs, inputs
SIZES = [
    (1000, 3072, 3072), (4097, 264, 200), (33, 9216, 64), (1, 8, 8), (513, 12288, 72), (129, 640, 4104),
    (20000, 512, 64), (300, 512, 192), (4608, 3072, 15360),
]  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(sizes, as_good_as_torch):
    m, n, k = sizes
    checked(as_good_as_torch, (rand(m, k), rand(n, k, spread=k**-0.5), rand(n)), {})


# rows, outputs, inputs, parts of the outputs, rank of their adapters, whether there is a gate
ADAPTED = [
    (2048, 1280, 1280, 1, 16, False), (2048, 3840, 1280, 3, 16, False), (300, 1920, 200, 3, 16, False),
    (8192, 640, 640, 1, 32, False), (1000, 3072, 3072, 1, 64, False), (77, 960, 768, 1, 128, False),
    (2048, 5120, 1280, 1, 16, True), (333, 640, 640, 1, 32, True), (1, 256, 64, 1, 16, False),
]  # fmt: skip


@pytest.mark.parametrize("extra", [0, 32])
@pytest.mark.parametrize("sizes", ADAPTED, ids=str)
def test_adapters(sizes, extra, as_good_as_torch, monkeypatch):
    m, n, k, parts, rank, gate = sizes
    if extra and (gate or rank == 32):
        pytest.skip("a tile that does not fit")
    monkeypatch.setattr(hopper_gemm_triton, "_wider", lambda *_: extra)
    ends = tuple(n // parts * (part + 1) for part in range(parts))
    if any(end % (128 + extra) for end in ends[:-1]):
        pytest.skip("tiles of two parts")
    more = {"gate": True, "shared": True, "activation": "gelu"} if gate else {"residual": True}
    case = product_case("adapted", (m, k), n, bias=True, low_rank=ends, rank=rank, **more)
    for dtype in (torch.float16, torch.bfloat16):
        args, given = case.make(torch.device("cuda"), dtype)
        checked(as_good_as_torch, args, given, dtype)


EPILOGUES = {
    "bias": {"bias": True},
    "gelu": {"bias": True, "activation": "gelu"},
    "gelu_tanh": {"bias": True, "activation": "gelu_tanh"},
    "silu": {"activation": "silu"},
    "relu2": {"activation": "relu2"},
    "residual, scale": {"residual": True, "scale": 0.5},
    "modulated": {"bias": True, "modulation": True},
    "modulated residual": {"bias": True, "modulation": True, "residual": True},
    "geglu": {"bias": True, "gate": True, "activation": "gelu"},
    "swiglu": {"gate": True, "activation": "silu"},
    "swiglu, one bias, all": {"gate": True, "activation": "silu", "bias": True, "up_bias": False, "residual": True,
                              "modulation": True, "scale": -1.5},
}  # fmt: skip


def epilogue(wanted, b, s, n, k, dtype, weight):
    given = {name: wanted[name] for name in ("activation", "scale") if name in wanted}
    if "gate" in wanted:
        given |= {"up": weight(), "up_bias": rand(n, dtype=dtype) if wanted.get("up_bias", "bias" in wanted) else None}
    if "residual" in wanted:
        given["residual"] = rand(b, s, n, dtype=dtype)
    if "modulation" in wanted:
        given["modulation"] = rand(b, n, dtype=dtype)
    return (rand(n, dtype=dtype) if "bias" in wanted else None), given


@pytest.mark.parametrize("wanted", EPILOGUES.values(), ids=list(EPILOGUES))
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((2, 500, 3072, 256), torch.bfloat16), ((3, 47, 136, 72), torch.float16), ((1, 4097, 640, 1280), torch.bfloat16)],
    ids=str,
)
def test_every_epilogue(wanted, sizes, dtype, as_good_as_torch):
    b, s, n, k = sizes

    def weight():
        return rand(n, k, dtype=dtype, spread=k**-0.5)

    bias, given = epilogue(wanted, b, s, n, k, dtype, weight)
    checked(as_good_as_torch, (rand(b, s, k, dtype=dtype), weight(), bias), given, dtype)


@pytest.mark.parametrize("wanted", EPILOGUES.values(), ids=list(EPILOGUES))
def test_rounded_as_separate_passes_round(wanted):
    """Equal bits, but where sums in another order fall to the other side of a half."""
    b, s, n, k = 2, 250, 520, 64
    bias, given = epilogue(wanted, b, s, n, k, torch.bfloat16, lambda: rand(n, k, spread=k**-0.5))
    args = rand(b, s, k), rand(n, k, spread=k**-0.5), bias
    found = hopper_gemm.triton(*args, rounded=True, **given)
    theirs = hopper_gemm.reference(*args, **given)
    assert float((found != theirs).float().mean()) < 0.02
    peak = theirs.double().abs().max()
    assert float((found.double() - theirs.double()).abs().max()) <= 2**-6 * peak


def test_strides(as_good_as_torch):
    """Rows of x, weight and residual in wider matrices, and a modulation that is one of six."""
    b, s, n, k = 2, 130, 520, 192
    x, weight, residual = rand(b, s, 3 * k)[..., k : 2 * k], rand(n, 2 * k)[:, :k], rand(b, s, 2 * n)[..., n:]
    modulation = rand(b, 6 * n).chunk(6, dim=1)[4]
    assert not any(t.is_contiguous() for t in (x, weight, residual, modulation))
    checked(as_good_as_torch, (x, weight, rand(n)), {"residual": residual, "modulation": modulation})


def test_the_halves_of_one_weight(as_good_as_torch):
    """As diffusers stores GEGLU: value over gate, and biases likewise."""
    x, weight, bias = rand(2, 300, 320), rand(2 * 1288, 320, spread=320**-0.5), rand(2 * 1288)
    (value, gate), (shift, other) = weight.chunk(2), bias.chunk(2)
    checked(as_good_as_torch, (x, gate, other), {"up": value, "up_bias": shift, "activation": "gelu"})


@pytest.mark.parametrize("sizes", [(3, 47, 136, 80), (2, 500, 3072, 1040)], ids=str)
@pytest.mark.parametrize("wanted", EPILOGUES.values(), ids=list(EPILOGUES))
def test_eight_bits(wanted, sizes, as_good_as_torch):
    b, s, n, k = sizes
    bias, given = epilogue(wanted, b, s, n, k, torch.bfloat16, lambda: quantized(n, k, torch.int8))
    x = quantize_rows.reference(rand(b, s, k), dtype=torch.int8)
    checked(as_good_as_torch, (QuantizedRows(*x), quantized(n, k, torch.int8), bias), given)


@pytest.mark.parametrize("wanted", EPILOGUES.values(), ids=list(EPILOGUES))
def test_float8_with_what_follows(wanted):
    b, s, n, k = 2, 500, 3072, 1040
    bias, given = epilogue(wanted, b, s, n, k, torch.bfloat16, lambda: quantized(n, k, FP8))
    x, weight = quantize_rows.reference(rand(b, s, k), dtype=FP8), quantized(n, k, FP8)
    found, right = (
        hopper_gemm.triton(x, weight, bias, fast=True, **given),
        hopper_gemm.reference(x, weight, bias, **given),
    )
    assert float((found.double() - right.double()).norm() / right.double().norm()) < 2e-2


def test_float8_in_shorter_sums():
    """Less exact, by no more than the sum of 13 bits that Hopper's tensor cores keep; only where that was asked for."""
    m, n, k = 500, 520, 4096
    x, weight = quantize_rows.reference(rand(m, k), dtype=FP8), quantized(n, k, FP8)
    exact = x.dequantized(torch.float64) @ weight.dequantized(torch.float64).t()
    assert hopper_gemm.supports(x, weight, fast=True) is None and "full sums" in hopper_gemm.supports(x, weight)
    for run, most in ((fp8_linear, 4e-3), (partial(hopper_gemm.triton, fast=True), 2e-2)):
        found = run(x, weight).double()
        assert float((found - exact).norm() / exact.norm()) < most, run


def test_in_a_graph_one_after_another():
    """Each product reads what the one before it wrote."""
    weights = [rand(1024, 1024, spread=1 / 32) for _ in range(6)]
    x = rand(700, 1024)

    def run():
        h = x
        for weight in weights:
            h = hopper_gemm.triton(h, weight, activation="relu2")
        return h

    wanted = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for _ in range(5):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, wanted)


@pytest.mark.parametrize("case", hopper_gemm.cases, ids=lambda case: case.name)
def test_cases(case, as_good_as_torch):
    args, given = case.make(torch.device("cuda"), torch.bfloat16)
    checked(as_good_as_torch, args, given)


def test_what_it_refuses():
    x, weight = rand(64, 128), rand(72, 128)
    for args, given, word in (
        ((x.float(), weight.float()), {}, "float32"),
        ((x, weight[:70]), {}, "multiple of 8"),
        ((rand(64, 100), rand(72, 100)), {}, "16 bytes"),
        ((x, weight.half()), {}, "times"),
        ((x.cpu(), weight), {}, "GPU"),
        ((x, weight), {"modulation": rand(7, 72)}, "modulation"),
        ((x, weight), {"residual": rand(64, 73)[:, :72]}, "residual"),
        ((x, weight), {"up": weight}, "activation"),
    ):
        assert word in hopper_gemm.supports(*args, **given)
