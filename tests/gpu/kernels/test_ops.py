"""Compiled kernels over every case, outputs poisoned, against float64 and torch's own error in the same dtype."""

import pytest
import torch
import triton
import triton.language as tl
from accel_kernels import OPS, autotune, quantized_linear
from accel_kernels.attention.backends import BACKENDS, AttentionChooser
from accel_kernels.errors import KernelRefused
from accel_kernels.gemm.linear import LinearChooser, torch_linear
from accel_kernels.gemm.quantized_weight import quantize_weight
from accel_kernels.warmup import launch, warmup
from torch.utils import _pytree as pytree

# None of them rounds once what it is given, or one GPU alone runs it: test_int8_linear.py, test_hopper_gemm.py,
# test_packed_rows.py, test_route.py, test_sample.py, test_timestamp_rule.py; or it writes into what it reads:
# test_recurrent.py
NUMBERS = (
    "beam_step", "causal_convolution", "fp8_linear", "hopper_gemm", "linear_attention_prompt", "linear_attention_step",
    "packed_rows", "quantize_rows", "reorder_beams", "route", "sample", "selective_scan", "timestamp_rule",
)  # fmt: skip
CASES = [
    pytest.param(op, case, id=f"{op.name}-{case.name}") for op in OPS if op.name not in NUMBERS for case in op.cases
]
# These leave float32 to torch.
LEFT = (
    "attention", "int8_linear", "linear_geglu", "low_rank_addend", "fused_linear", "packed_attention",
    "quantized_linear",
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("op, case", CASES)
def test_kernel_is_as_good_as_torch(op, case, dtype, as_good_as_torch, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # cuDNN would round some convolutions and not others
    args, kwargs = case.make(torch.device("cuda"), dtype)
    reason = op.supports(*args, **kwargs)
    if reason is not None:
        assert op.name in LEFT and (dtype == torch.float32 or "rows of" in reason or "a wrong kernel" in reason), reason
        pytest.skip(reason)
    if sum(t.numel() for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)) > 3e8:
        pytest.skip("its float64 reference takes too much memory")
    as_good_as_torch(op, args, kwargs, dtype)


@pytest.mark.parametrize("name", [n for n in BACKENDS if n != "xformers"])
def test_every_backend_computes_attention_on_packed_views(name):
    qkv = torch.randn(2, 100, 3, 4, 40, device="cuda", dtype=torch.float16)
    q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    got = AttentionChooser(name)(q, k, v)
    assert float((got.double() - exact).abs().max()) < 4e-3 * float(exact.abs().max())


def test_choices_are_measured_once_and_kept_on_disk(tmp_path, monkeypatch):
    q, k, v = (torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    path = tmp_path / "choices.json"
    chooser = AttentionChooser("auto", path)
    choice = chooser.choose(q, k, v)
    assert choice in BACKENDS and path.exists()
    again = AttentionChooser("auto", path)
    monkeypatch.setattr(autotune, "race", None)  # must not be needed
    assert again.choose(q, k, v) == choice


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 77, 64, 136), (1, 8192, 320, 320), (3, 5, 8, 8), (128, 1, 4096, 1024)])
def test_every_algorithm_of_cublaslt_is_the_linear_layer(shape, dtype, bias, residual, tmp_path):
    """Each candidate by itself, inside a CUDA graph as it is used, against float64."""
    batch, length, depth, outs = shape
    x = torch.randn(batch, length, depth, device="cuda", dtype=dtype)
    weight = torch.randn(outs, depth, device="cuda", dtype=dtype) * depth**-0.5
    shift = torch.randn(outs, device="cuda", dtype=dtype) if bias else None
    added = torch.randn(batch, length, outs, device="cuda", dtype=dtype) if residual else None
    given = x, weight, shift, added
    exact = torch_linear(*(None if t is None else t.double() for t in given))
    own = float((torch_linear(*given).double() - exact).abs().max())
    path = tmp_path / "linear.json"
    chooser = LinearChooser(path)
    chooser(*given)
    ((key, product),) = chooser.products.items()
    assert product.algorithms and path.exists()
    for rank in range(len(product.algorithms)):
        chooser.choices[key] = str(rank)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = chooser(*given)
        y.fill_(float("nan"))
        graph.replay()
        assert float((y.double() - exact).abs().max()) <= 2 * own + 1e-6, rank
    again = LinearChooser(path)
    again._trial = None  # must not be needed
    again(*given)


@pytest.mark.parametrize("images", [1, 2])
def test_products_into_rows_of_a_larger_tensor(images):
    """Of a text and of an image, beside each other; other memory stays as it is."""
    chooser, graph = LinearChooser(), torch.cuda.CUDAGraph()
    weight, bias = (torch.randn(*size, device="cuda").bfloat16() / 8 for size in ((192, 64), (192,)))
    x = torch.randn(images, 136, 64, device="cuda").bfloat16()
    into = torch.full((images, 256, 192), 7.0, device="cuda", dtype=torch.bfloat16)
    chooser(x, weight, bias, out=into[:, 40:176])
    with torch.cuda.graph(graph):
        chooser(x, weight, bias, out=into[:, 40:176])
    wanted = torch.nn.functional.linear(x, weight, bias)
    for run in (lambda: chooser(x, weight, bias, out=into[:, 40:176]), graph.replay):
        into[:, 40:176] = float("nan")
        run()
        torch.testing.assert_close(into[:, 40:176], wanted)
        assert bool((into[:, :40] == 7).all()) and bool((into[:, 176:] == 7).all())


def test_what_cublaslt_cannot_do_is_left_to_torch():
    chooser = LinearChooser()
    for x, weight in (
        (torch.randn(4, 8), torch.randn(16, 8)),
        (torch.randn(4, 8, device="cuda"), torch.randn(16, 8, device="cuda")),
        (torch.randn(4, 7, device="cuda").half(), torch.randn(16, 7, device="cuda").half()),
        (torch.randn(8, 8, device="cuda").half().t(), torch.randn(16, 8, device="cuda").half()),
    ):
        assert torch.equal(chooser(x, weight), torch.nn.functional.linear(x, weight))
    assert not chooser.products and not chooser.choices


@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 40])
def test_scales_of_another_dtype_than_the_rows(rows, scales, as_good_as_torch):
    """A model that is moved to another dtype keeps the scales it was quantized with."""
    torch.manual_seed(0)
    weight = quantize_weight(torch.randn(70, 256, device="cuda"), torch.int32, 32, zeros=True)
    weight = weight._replace(scales=weight.scales.to(scales))
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randn(rows, 256, device="cuda", dtype=dtype)
        assert quantized_linear.supports(x, weight) is None
        as_good_as_torch(quantized_linear, (x, weight), {}, dtype)


@triton.jit
def refused_kernel(ptr, WRONG: tl.constexpr):
    tl.static_assert(not WRONG)
    tl.store(ptr, 1)


def test_a_kernel_that_does_not_compile_leaves_the_others_be():
    """Triton 3.6 leaves its asynchronous mode on where an error leaves it, with threads that are gone."""
    mark = torch.zeros(1, device="cuda", dtype=torch.int32)
    with warmup():  # it shows where it is launched
        launch(refused_kernel, (1,), mark, WRONG=True)
    with warmup():
        launch(refused_kernel, (1,), mark, WRONG=False)
    launch(refused_kernel, (1,), mark, WRONG=False)
    assert mark.item() == 1
    with pytest.raises(KernelRefused, match="Compil"):
        launch(refused_kernel, (1,), mark, WRONG=True)
