"""Keys and values in 8 bits: the rounding itself, and attention over what was rounded against fp32 over the same."""

import pytest
import torch
from accel_kernels import KV, paged_attention
from accel_kernels.attention.paged.kv import LENGTH, metadata_of
from accel_kernels.attention.paged.kv_quantization import TOPS, restored, rounded

pytest.importorskip("triton")
from support.kernels.code_kernel import run, ties
from support.kernels.compiler import in_a_process

KINDS = [pytest.param(dtype, id=str(dtype).split(".")[1]) for dtype in TOPS]
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
COMPILE = """
import triton
import triton.language as tl
from support.kernels.code_kernel import codes_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

for pointer, code in (("*i8", tl.int8), ("*fp8e4nv", tl.float8e4nv)):
    types = {"x_ptr": "*fp16", "codes_ptr": pointer, "scale_ptr": "*fp32"}
    constants = {"DIM": 64, "ROWS": 1, "CODE": code}
    source = ASTSource(codes_kernel, types | dict.fromkeys(constants, "constexpr"), constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    assert "div.rn.f32" in ptx, pointer
    assert not [word for word in ("div.full", "div.approx", "rcp.", "fma.") if word in ptx], pointer
print("exact")
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("code", KINDS)
def test_what_is_restored_is_the_nearest_code(code, dtype):
    t = (torch.randn(5, 3, 40) * torch.logspace(-4, 3, 5).view(-1, 1, 1)).to(dtype)
    codes, scales = rounded(t, code)
    assert codes.dtype == code and scales.dtype == torch.float32 and scales.shape == t.shape[:-1]
    off = (restored(codes, scales, torch.float32) - t.float()).abs()
    every = torch.arange(-127, 128).float() if code == torch.int8 else torch.arange(256).to(torch.uint8).view(code)
    every = every.float()[every.float().isfinite()]
    least = (every * scales[..., None, None] - t.float()[..., None]).abs().amin(-1)
    assert (off <= least * (1 + 1e-4) + 1e-5 * scales[..., None]).all()
    assert torch.equal(codes.float().abs().amax(-1), torch.full(t.shape[:-1], TOPS[code]))


@pytest.mark.parametrize("code", KINDS)
def test_rounding_what_was_rounded_changes_no_code(code):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        codes, scales = rounded(torch.randn(50, 64).to(dtype), code)
        again, their_scales = rounded(restored(codes, scales, dtype), code)
        assert torch.equal(codes.float(), again.float())
        torch.testing.assert_close(their_scales, scales, rtol=1e-6, atol=0)


@pytest.mark.parametrize("code", KINDS)
def test_heads_of_zeros_of_tiny_and_of_endless_numbers(code):
    t = torch.zeros(4, 8)
    t[1], t[2, 3], t[3, 5] = 1e-38, float("inf"), float("nan")
    back = restored(*rounded(t, code), torch.float32)
    assert torch.equal(back[:2], torch.zeros(2, 8))
    assert not back[2].isfinite().all() and back[3].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("code", KINDS)
def test_codes_and_scales_are_of_divisions_rounded_once(code, dtype):
    """Against fp64, of which one rounding to fp32 is that of the exact quotient."""
    t = ties(code, dtype)
    codes, scales = rounded(t, code)
    top = t.double().abs().amax(-1)
    assert torch.equal(scales, (top / TOPS[code]).float())
    steps = t.float() * (TOPS[code] / top).float()[:, None]
    wanted = (steps.double() + 0.5).floor() if code == torch.int8 else steps.to(code).double()
    assert torch.equal(codes.double(), wanted)


@INTERPRETED
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_kernel_rounds_bit_for_bit_as_the_reference(dtype):
    """Of 8-bit floats the interpreter cuts off what GPUs round, so tests/gpu compares those."""
    t = ties(torch.int8, dtype)
    codes, scales = torch.full_like(t, 99, dtype=torch.int8), torch.full((len(t),), torch.nan)
    run(t, codes, scales, 32)
    wanted = rounded(t, torch.int8)
    assert torch.equal(codes, wanted[0]) and torch.equal(scales, wanted[1])


@pytest.mark.turns(4)
def test_compiled_it_divides_exactly_and_adds_to_no_unrounded_product(tmp_path):
    assert in_a_process(COMPILE, tmp_path).strip() == "exact"


def over(name: str):
    """A case of the op, its kernel's own store, and the result."""
    case = next(case for case in paged_attention.cases if case.name == name)
    (q, k, v, kv, scale), kwargs = case.make(torch.device("cpu"), torch.float32)
    return (q, k, v, kv, scale), kwargs


@INTERPRETED
@pytest.mark.parametrize(
    "name", [case.name for case in paged_attention.cases if case.small and case.name.startswith("int8")]
)
@pytest.mark.share(3)
@pytest.mark.turns(2)
def test_the_kernel_attends_to_exactly_what_it_stored(name):
    """fp64 attention over the codes and scales that the kernel left, the new tokens' too."""
    (q, k, v, kv, scale), kwargs = over(name)
    stored, new = kv.stored(), q.shape[1]
    got = paged_attention.triton(q, k, v, kv, scale, **kwargs)
    keys, values = kv.read(stored + new, torch.float64)
    table = torch.arange(len(keys), dtype=torch.int32).view(-1, 1)
    plain = KV(keys.clone(), values.clone(), table, kv.padding_mask, kv.metadata, 0, last=kv.last)  # a block a row
    given = {name: t.double() if isinstance(t, torch.Tensor) else t for name, t in kwargs.items()}
    cos, sin, interleaved = (given.pop(name, None) for name in ("cos", "sin", "interleaved"))
    if cos is not None:
        alone = plain._replace(
            keys=torch.empty_like(q, dtype=torch.float64), metadata=torch.zeros(1, dtype=torch.int64)
        )
        alone = alone._replace(values=alone.keys.clone(), table=table, padding_mask=None)
        paged_attention.reference(*(q.double(),) * 3, alone, 1.0, cos=cos, sin=sin, interleaved=bool(interleaved))
        q = alone.keys  # as the operation turns keys, and the keys of the case are turned already
    wanted = paged_attention.reference(q.double(), keys[:, stored:], values[:, stored:], plain, scale, **given)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=3e-6)


@INTERPRETED
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("new", [1, 5])
def test_eight_bit_floats_that_are_exact(new, dtype):
    """The interpreter cuts off where GPUs round to the nearest: numbers that are codes already come out the same."""
    code = torch.float8_e4m3fn
    every = torch.arange(256, dtype=torch.uint8).view(code).float()
    every = every[every.isfinite()]

    def numbers(*size):
        t = every[torch.randint(len(every), size)] * 2.0**-6
        t[..., 0] = 448.0 * 2.0**-6
        return t

    (_, _, _, kv, _), _ = over("int8-verify")
    rows, heads, dim = kv.table.shape[0], kv.keys.shape[2], kv.keys.shape[3]
    parts = [rounded(numbers(*kv.keys.shape), code) for _ in range(2)]
    outputs = []
    q, k, v = torch.randn(rows, new, 4, dim), numbers(rows, new, heads, dim), numbers(rows, new, heads, dim)
    q, k, v = (t.to(dtype) for t in (q, k, v))
    for function in (paged_attention.reference, paged_attention.triton):
        (keys, key_scales), (values, value_scales) = ((c.clone(), s.mT.contiguous().mT) for c, s in parts)
        where = metadata_of(kv.table.shape[1], [(kv.table, keys, values, key_scales, value_scales)], kv.table.device)
        where[LENGTH] = kv.stored()
        one = kv._replace(keys=keys, values=values, key_scales=key_scales, value_scales=value_scales, metadata=where)
        outputs.append((function(q, k, v, one, dim**-0.5), keys.float(), values.float(), key_scales, value_scales))
    (theirs, *stored), (mine, *ours) = outputs
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 4e-3)
    assert all(torch.equal(a, b) for a, b in zip(ours[:2], stored[:2], strict=True))
    for a, b in zip(ours[2:], stored[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


@INTERPRETED
@pytest.mark.parametrize("size", [1e-7, 1.0, 200.0])
def test_scales_outside_the_range_of_half_precision(size):
    """A weight times the scale of tiny values would vanish in fp16."""
    (q, k, v, kv, scale), kwargs = over("int8-decode")
    kv.value_scales.mul_(size / kv.value_scales.max())
    v = (v * size).half().float()
    half = {name: t.half() if isinstance(t, torch.Tensor) else t for name, t in kwargs.items()}
    wanted = paged_attention.reference(q, k, v, kv, scale, **kwargs)
    got = paged_attention.triton(q.half(), k.half(), v.half(), kv, scale, **half)
    assert float((got.double() - wanted).abs().max()) < 4e-3 * float(wanted.abs().max()) + 6e-8


@INTERPRETED
@pytest.mark.parametrize("code", KINDS)
def test_a_prompt_is_shown_what_is_stored(code):
    from accel_kernels.attention.paged.rotary_store_triton import rotary_store

    (q, k, v, kv, _), kwargs = over("int8-prefill")
    if code != torch.int8:
        keys, values = kv.keys.to(code), kv.values.to(code)
        kept = (kv.table, keys, values, kv.key_scales, kv.value_scales)
        kv = kv._replace(keys=keys, values=values, metadata=metadata_of(kv.table.shape[1], [kept], kv.table.device))
    _, keys, values = rotary_store(
        q, k, v, kv, **{name: value for name, value in kwargs.items() if name != "gate"}, shown=True
    )
    for shown, stored in zip((keys, values), kv.read(q.shape[1], torch.float32), strict=True):
        assert torch.equal(shown, stored)
