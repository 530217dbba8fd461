"""Every op's kernel, in Triton's interpreter, against its reference in float64.

An op's first case runs, and of the others every third, but those that take the interpreter long: they are run by the
tests below and beside, of prompts, stores and experts. Dtypes come in turn: kernels compute in float32 whatever they
read. ACCEL_TEST_EVERYTHING=1 runs all.
"""

import pickle

import pytest
import torch
import torch.nn.functional as F
from accel_kernels import OPS, Quantized

from support.everything import EVERYTHING

pytest.importorskip("triton")

# What they give is no rounding of what they are given: tests of their own.
STATES = (
    "causal_convolution",
    "linear_attention_prompt",
    "linear_attention_step",
    "reorder_beams",
    "selective_scan",
)  # in place
NUMBERS = ("beam_step", "packed_rows", "quantize_rows", "route", "sample", "timestamp_rule", *STATES)
COMPILED = ("hopper_gemm", "linear_geglu")  # no interpreter runs these
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


LONG = {
    "experts": ("int4", "int8", "fp8"),
    "paged_attention": ("prefill", "int8-prefill", "ragged-a", "ragged-i", "ragged-m", "ragged-p"),
    "quantized_linear": ("int8-gate", "int8-layer", "int4-32", "int4-odd", "int4-128", "int4-64-residual", "fp8-gate"),
}


def dtypes(op, number: int, case) -> list[torch.dtype]:
    """Those that an op's case of this number runs in."""
    if EVERYTHING:
        return DTYPES
    long = case.name.startswith(LONG.get(op.name, ()))
    return [DTYPES[(number + len(op.name)) % 3]] if number == 0 or (number % 3 == 2 and not long) else []


SMALL = [
    pytest.param(op, case, dtype, id=f"{op.name}-{case.name}-{dtype}")
    for op in OPS
    if op.name not in NUMBERS + COMPILED
    for number, case in enumerate(case for case in op.cases if case.small)
    for dtype in dtypes(op, number, case)
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
@pytest.mark.parametrize("op, case, dtype", SMALL)
@pytest.mark.share(1)
@pytest.mark.turns(2)
def test_kernel_is_as_good_as_torch(op, case, dtype, as_good_as_torch):
    args, kwargs = case.make(torch.device("cpu"), dtype)
    if dtype != torch.bfloat16 and op.supports(*args, **kwargs) is not None:
        assert str(dtype).split(".")[1] in refused(op, *args, **kwargs)  # some leave float32 to cuBLAS
        assert dtype == torch.float32 or op.name == "fp8_linear"
        return
    assert op.supports(*args, **kwargs) is None
    as_good_as_torch(op, args, kwargs, dtype)


# Each shows a fault of tests/faults that no other row that always runs does.
ALONE = [
    ("rms_norm", "one"),
    ("layer_norm", "odd"),
    ("gated", "odd-halves"),
    ("geglu", "turned"),
    ("fused_linear", "gate"),
    ("fused_linear", "gate-bias"),
    ("experts", "interleaved"),
    ("packed_attention", "alike"),
    ("paged_attention", "decode-window"),
    ("paged_attention", "decode-sinks"),
    ("paged_attention", "decode-hidden"),
    ("paged_attention", "ragged-many-decodes"),
    ("paged_attention", "ragged-mixed-idle"),
    ("paged_attention", "ragged-none"),
    ("paged_attention", "decode-norm-after"),
    ("paged_attention", "decode-chunked"),
    ("paged_attention", "decode-softplus"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
@pytest.mark.parametrize(("name", "case"), ALONE)
@pytest.mark.share(1)
@pytest.mark.turns(2)
def test_what_no_other_row_shows(name, case, as_good_as_torch):
    op = next(op for op in OPS if op.name == name)
    make = next(one for one in op.cases if one.name == case).make
    made = ((make(torch.device("cpu"), dtype), dtype) for dtype in DTYPES)
    (args, kwargs), dtype = next(one for one in made if op.supports(*one[0][0], **one[0][1]) is None)
    as_good_as_torch(op, args, kwargs, dtype)


@pytest.mark.parametrize("op", [op for op in OPS if op.name not in STATES], ids=lambda op: op.name)
def test_on_cpu_an_op_is_its_reference(op):
    args, kwargs = next(case for case in op.cases if case.small).make(torch.device("cpu"), torch.float32)
    found, wanted = op(*args, **kwargs), op.reference(*args, **kwargs)
    for ours, theirs in zip(many(found), many(wanted), strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        else:
            assert ours == theirs


def many(output) -> tuple:
    return output if isinstance(output, tuple) else (output,)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_an_op_pickles_as_itself(op):
    assert pickle.loads(pickle.dumps(op)) is op


def refused(op, *args, **kwargs):
    reason = op.supports(*args, **kwargs)
    assert isinstance(reason, str)
    return reason


def test_unsupported_inputs_are_named():
    ops = {op.name: op for op in OPS}
    image = torch.randn(2, 8, 4, 4)
    nhwc = image.contiguous(memory_format=torch.channels_last)
    assert "channels-last" in refused(ops["group_norm"], image, 2, None, None, 1e-5)
    assert "groups" in refused(ops["group_norm"], nhwc, 3, None, None, 1e-5)
    assert "float64" in refused(ops["group_norm"], nhwc.double(), 2, None, None, 1e-5)
    assert "dimensions" in refused(ops["group_norm"], nhwc[0], 2, None, None, 1e-5)
    assert "empty" in refused(ops["geglu"], torch.empty(0, 8))
    assert "odd" in refused(ops["geglu"], torch.randn(2, 7))
    assert "contiguous" in refused(ops["layer_norm"], torch.randn(4, 4).t(), None, None, 1e-5)
    assert "residual" in refused(ops["layer_norm"], torch.randn(4, 4), None, None, 1e-5, residual=torch.randn(4, 5))
    assert "residual" in refused(ops["image_sum"], nhwc, nhwc[:1])
    assert "channels-last" in refused(ops["upsample"], image)
    q = torch.randn(1, 1, 4, 1024)
    assert "head dimension" in refused(ops["attention"], q, q, q)
    assert "keys" in refused(
        ops["attention"], torch.randn(1, 2, 4, 8), torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8)
    )


def test_quantized_weights_the_kernel_cannot_read_are_named():
    op = next(op for op in OPS if op.name == "quantized_linear")
    case = next(case for case in op.cases if case.name == "int4-32")
    (x, weight, _), more = case.make(torch.device("cpu"), torch.float16)
    assert op.supports(x, weight) is None
    assert "float32" in refused(op, x.float(), weight)
    assert "rows" in refused(op, x.expand(513, -1).contiguous(), weight)
    assert "gate" in refused(op, x, weight, up=more["up"])
    assert "gate" in refused(op, x, weight, up=more["up"]._replace(scales=weight.scales.float()), activation="silu")
    assert "inputs" in refused(op, x[:, :64].contiguous(), weight)
    assert "contiguous" in refused(op, x, weight._replace(data=weight.data.t().contiguous().t()))
    assert "contiguous" in refused(op, x.expand(2, -1), weight)
    assert "16 columns" in refused(op, x, weight._replace(scales=weight.scales.repeat(1, 2)))
    assert "4 bytes" in refused(op, *at_odd_bytes(x, weight.numbers()))


def at_odd_bytes(x, numbers):
    data = torch.empty(numbers.numel() + 1, dtype=torch.int8)[1:].view(numbers.shape).copy_(numbers)
    return x, Quantized.of(data, torch.ones(len(data), 1, dtype=x.dtype))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
@pytest.mark.parametrize("name", ["int8-layer-bias-gelu", "int4-odd"][: 1 + EVERYTHING])
@pytest.mark.turns(2)
def test_the_norm_before_a_quantized_weight_may_be_of_float32(name, as_good_as_torch):
    op = next(op for op in OPS if op.name == "quantized_linear")
    args, more = next(case for case in op.cases if case.name == name).make(torch.device("cpu"), torch.float16)
    norm = more["norm"]
    bias = None if norm.bias is None else norm.bias.float()
    more["norm"] = norm._replace(weight=norm.weight.float(), bias=bias)
    assert op.supports(*args, **more) is None
    as_good_as_torch(op, args, more, torch.float16)


@pytest.mark.parametrize("name", ["int8-gate-bias", "int4-64-zeros", "fp8"])
def test_more_rows_than_the_kernel_takes_are_the_same_product(name):
    op = next(op for op in OPS if op.name == "quantized_linear")
    (x, weight, bias), more = next(case for case in op.cases if case.name == name).make(
        torch.device("cpu"), torch.float32
    )
    x = torch.randn(520, x.shape[1])
    if "residual" in more:
        more["residual"] = torch.randn(520, weight.shape[0])
    torch.testing.assert_close(op.instead(x, weight, bias, **more), op.reference(x, weight, bias, **more))


def test_group_norm_keeps_its_digits_far_from_zero():
    """Mean 1000 times the deviation: sums of squares from zero would lose all of them in fp32."""
    op = next(op for op in OPS if op.name == "group_norm")
    x = (torch.randn(1, 8, 40, 41, dtype=torch.float64) + 1000).contiguous(memory_format=torch.channels_last)
    exact = op.reference(x, 2, None, None, 1e-5)
    ours = op.triton(x.float(), 2, None, None, 1e-5)
    naive_floor = float((x.float().double() - x).abs().max())  # what rounding the input to fp32 costs already
    assert float((ours.double() - exact).abs().max()) < 20 * naive_floor


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("shape", [(2, 8, 16, 16), (2, 8, 1, 7), (3, 8, 1, 1)], ids=str)
def test_the_reference_of_group_norm_is_as_exact_in_every_layout(shape, layout):
    """Near 3 with little variation, one channel a group: torch's own over channels-last images is off by 0.9."""
    op = next(op for op in OPS if op.name == "group_norm")
    x = (3 + 1e-3 * torch.randn(shape)).contiguous(memory_format=layout)
    exact, torchs = (F.group_norm(t, 8, eps=1e-5) for t in (x.double().contiguous(), x.contiguous().flatten(2)))
    ours = op.reference(x, 8, None, None, 1e-5)
    errors = [float((t.view(shape).double() - exact).abs().max()) for t in (ours.contiguous(), torchs)]
    assert errors[0] <= 2 * errors[1] < 1e-3
    assert ours.stride() == x.stride()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
@pytest.mark.parametrize(
    ("name", "height", "dtype"),
    [
        (name, height, dtype)
        for name, height, those in (("image_sum", 64, DTYPES[::2]), ("image_concat", 32, DTYPES[1:2]))
        for dtype in (DTYPES if EVERYTHING else those)
    ],
    ids=str,
)
@pytest.mark.share(3)
@pytest.mark.turns(2)
def test_moments_taken_while_writing_serve_the_norm(name, height, dtype):
    """Just large enough for channel stats to be taken."""
    ops = {op.name: op for op in OPS}
    x, other = (
        (torch.randn(1, 96, height, 67) * 2 + 5).to(dtype).contiguous(memory_format=torch.channels_last)
        for _ in range(2)
    )
    given = (x, other, torch.randn(96).to(dtype), 1.5) if name == "image_sum" else (x, other)
    y, channel_stats = ops[name].triton(*given)
    weight, bias, add = torch.randn(y.shape[1]), torch.randn(y.shape[1]), torch.randn(1, y.shape[1])
    args, more = (3, weight.to(dtype), bias.to(dtype), 1e-5), {"add": add.to(dtype), "silu": True}
    ours = ops["group_norm"].triton(y, *args, **more, channel_stats=channel_stats)
    assert channel_stats is not None
    step = {"rtol": torch.finfo(dtype).eps, "atol": 2e-5}  # one rounding
    torch.testing.assert_close(ours, ops["group_norm"].triton(y, *args, **more), **step)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
def test_the_norm_merges_moments_of_more_chunks_than_fit_at_once():
    """Every chunk has another mean, so that one left out, or taken twice, shows."""
    op = next(op for op in OPS if op.name == "group_norm")
    rows, chunk_rows = 40 * 120, 64  # 75 chunks; the kernel takes 64 at once
    x = torch.randn(1, 8, rows, dtype=torch.float64) + torch.linspace(-9, 9, rows, dtype=torch.float64)
    chunks = x.split(chunk_rows, dim=-1)
    means = torch.stack([chunk.mean(-1) for chunk in chunks], 1)
    squares = torch.stack([chunk.var(-1, correction=0) * chunk.shape[-1] for chunk in chunks], 1)
    channel_stats = torch.stack([means, squares], 2).float().contiguous()
    assert channel_stats.shape == (1, 75, 2, 8)
    image = x.view(1, 8, 40, 120).contiguous(memory_format=torch.channels_last)
    exact = op.reference(image, 2, None, None, 1e-5)
    ours = op.triton(image.float(), 2, None, None, 1e-5, channel_stats=(channel_stats, chunk_rows))
    assert float((ours.double() - exact).abs().max()) < 1e-5


ATTEND = [case for op in OPS if op.name == "paged_attention" for case in op.cases if case.small]
PREFILLS = [one for one in ATTEND if one.name.startswith("prefill") and not one.name.endswith("mask")]
# Long in the interpreter: without ACCEL_TEST_EVERYTHING=1 each is stored one way, through the table or by address.
BY_ADDRESS = [case for case in PREFILLS if EVERYTHING or case.name in ("prefill", "prefill-valid", "prefill-window")]
BY_TABLE = [c for n, c in enumerate(ATTEND) if EVERYTHING or (c not in BY_ADDRESS and (n % 2 or "full" in c.name))]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
@pytest.mark.parametrize("case", BY_TABLE, ids=lambda case: case.name)
@pytest.mark.share(8)
@pytest.mark.turns(2)
def test_new_keys_and_values_are_stored_where_the_table_says_and_nowhere_else(case):
    op = next(op for op in OPS if op.name == "paged_attention")
    (*qkv, theirs, scale), kwargs = case.make(torch.device("cpu"), torch.float32)
    (*_, ours, _), _ = case.make(torch.device("cpu"), torch.float32)
    op.reference(*qkv, theirs, scale, **kwargs)
    op.triton(*qkv, ours, scale, **kwargs)
    for name in ("keys", "values"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
@pytest.mark.parametrize("case", BY_ADDRESS, ids=lambda case: case.name)
def test_a_graph_finds_keys_and_values_by_their_addresses(case):
    """What it is shown besides is another store's."""
    op = next(op for op in OPS if op.name == "paged_attention")
    (*qkv, theirs, scale), kwargs = case.make(torch.device("cpu"), torch.float32)
    (*_, ours, _), _ = case.make(torch.device("cpu"), torch.float32)
    other = {name: torch.full_like(getattr(ours, name), float("nan")) for name in ("keys", "values")}
    wanted = op.reference(*qkv, theirs, scale, **kwargs)
    found = op.triton(*qkv, ours._replace(is_prefill=True, by_address=True, **other), scale, **kwargs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-5, atol=1e-6)
    assert all(t.isnan().all() for t in other.values())
