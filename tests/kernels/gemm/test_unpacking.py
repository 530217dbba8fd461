"""The PTX that unpacks words of numbers, run here instruction by instruction for every number in every place.

Triton's interpreter takes plain arithmetic in its stead, so nothing else sees it without a GPU.
"""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from accel_kernels import experts, quantized_linear
from accel_kernels.gemm.quantized import gemv_triton, skinny_triton
from accel_kernels.gemm.quantized.operands import unpacking_triton as unpacking
from accel_kernels.gemm.quantized_weight import E2M1_SHIFT, unpack
from accel_kernels.moe import experts_triton
from triton.runtime.interpreter import TensorHandle

from support.everything import EVERYTHING

HALF = {"bf16": torch.bfloat16, "f16": torch.float16}
TWO16 = np.uint32(1 << 16)


def halves(word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return (word & 0xFFFF).astype(np.uint16), (word >> 16).astype(np.uint16)


def floats(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    signed = {1: np.int8, 2: np.int16, 4: np.int32}[bits.itemsize]
    return torch.from_numpy(bits.view(signed).copy()).view(dtype).double()


def bits_of(values: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    size = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}[dtype.itemsize]
    return values.to(dtype).view(size[0]).numpy().view(size[1])


def pairwise(function, dtype: torch.dtype, *words: np.ndarray) -> np.ndarray:
    low, high = (bits_of(function(*(floats(half, dtype) for half in side)), dtype).astype(np.uint32)
                 for side in zip(*map(halves, words), strict=True))  # fmt: skip
    return low | high << 16


def permuted(a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
    """prmt: each nibble of the selector names a byte, 0-3 of a, 4-7 of b."""
    chosen = np.zeros_like(a)
    for place in range(4):
        byte = selector >> 4 * place & 15
        assert byte < 8
        chosen |= ((a if byte < 4 else b) >> 8 * (byte % 4) & 0xFF) << 8 * place
    return chosen


def logic(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """lop3: bit 4 a + 2 b + c of the table is the result for these bits."""
    result = np.zeros_like(a)
    for case in range(8):
        if table >> case & 1:
            result |= (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
    return result


def run(text: str, outputs: int, *inputs: np.ndarray) -> list[np.ndarray]:
    """What the statements of an asm leave in $0 .. $(outputs - 1), as bits."""
    registers = {f"${outputs + at}": value for at, value in enumerate(inputs)}
    like = inputs[0]

    def value(name: str) -> np.ndarray:
        if name.startswith("0f"):
            return np.full_like(like, int(name[2:], 16))
        if name[0].isdigit():
            return np.full_like(like, int(name, 0))
        return registers[name]

    for statement in re.findall(r"(?<=\n)([a-z][^;{}]*(?:\{[^}]*\})?[^;{}]*);", text):
        instruction, rest = statement.split(" ", 1)
        kind = instruction.split(".")
        groups = re.findall(r"\{[^}]*\}|[^,\s{}]+", rest)
        target, sources = groups[0], groups[1:]
        if kind[0] == "mov" and target.startswith("{"):
            for name, half in zip(re.findall(r"[^{},\s]+", target), halves(value(sources[0])), strict=True):
                registers[name] = half
            continue
        args = [value(name) for name in sources]
        if kind[0] == "mov":
            result = args[0]
        elif kind[0] == "xor":
            result = args[0] ^ args[1]
        elif kind[0] == "and":
            result = args[0] & args[1]
        elif kind[0] == "shl":
            result = args[0] << args[1]
        elif kind[0] == "shr":
            result = args[0] >> args[1]
        elif kind[0] == "mul":
            result = args[0] * args[1]
        elif kind[0] == "prmt":
            result = permuted(args[0], args[1], int(sources[2], 0))
        elif kind[0] == "lop3":
            result = logic(*args[:3], int(sources[3], 0))
        elif instruction == "sub.rn.f32":
            result = bits_of(floats(args[0], torch.float32) - floats(args[1], torch.float32), torch.float32)
        elif instruction == "cvt.f32.f16":
            result = bits_of(floats(args[0], torch.float16), torch.float32)
        elif instruction == "cvt.rn.f16x2.e4m3x2":
            low, high = (
                bits_of(floats((args[0] >> shift & 0xFF).astype(np.uint8), torch.float8_e4m3fn), torch.float16)
                for shift in (0, 8)
            )
            result = low.astype(np.uint32) | high.astype(np.uint32) << 16
        elif instruction in ("fma.rn.bf16x2", "fma.rn.f16x2"):
            result = pairwise(lambda a, b, c: a * b + c, HALF[kind[2][:-2]], *args)
        elif instruction == "sub.rn.f16x2":
            result = pairwise(lambda a, b: a - b, torch.float16, *args)
        else:
            raise AssertionError(f"unknown instruction {instruction}")
        registers[target] = result
    return [registers[f"${at}"] for at in range(outputs)]


def words() -> np.ndarray:
    """Every byte in every place, beside random neighbors."""
    made = np.random.default_rng(0).integers(0, 1 << 32, (4, 256), dtype=np.uint32)
    for place in range(4):
        made[place] = (made[place] & ~np.uint32(255 << 8 * place)) | np.arange(256, dtype=np.uint32) << 8 * place
    return made.reshape(-1)


def numbers(given: np.ndarray, format: str) -> torch.Tensor:
    data = torch.from_numpy(given.view(np.int32).copy())[:, None]
    if format == "int4":
        return unpack(data).double()
    return data.view(torch.int8 if format == "int8" else torch.float8_e4m3fn).double()


@pytest.mark.parametrize("format, dtype", [("int8", "bf16"), ("int8", "fp16"), ("int4", "bf16"), ("int4", "fp16")])
def test_factors_are_the_numbers_exactly(format, dtype):
    given = words()
    made = run(unpacking.by_place.fn(format, dtype), {"int8": 4, "int4": 8}[format], given)
    found = torch.stack([floats(bits, HALF["bf16" if dtype == "bf16" else "f16"]) for bits in made], 1)
    assert torch.equal(found, numbers(given, format))


@pytest.mark.parametrize("format, unpack_mode", [("int8", "exact"), ("int8", "rough"), ("fp8", "exact")])
def test_planes_of_bytes_are_the_numbers_plus_what_is_said(format, unpack_mode):
    given = words()
    text = {"int8": "INT8_PLANES", "int8rough": "INT8_ROUGH_PLANES", "fp8": "FP8_PLANES"}
    made = run(getattr(unpacking, text[format + unpack_mode * (unpack_mode == "rough")]).value, 4, given)
    found = torch.stack([floats(bits, torch.float32) for bits in made], 1) - unpacking.excess.fn(0, format, unpack_mode)
    torch.testing.assert_close(found, numbers(given, format), rtol=0, atol=0, equal_nan=True)


def test_planes_of_nibbles_exceed_the_numbers_by_what_is_said():
    given = words()
    made = run(unpacking.INT4_PLANES.value, 8, given, np.full_like(given, TWO16))
    over = torch.tensor([unpacking.excess.fn(place, "int4", "exact") for place in range(8)], dtype=torch.float64)
    found = torch.stack([floats(bits, torch.float32) for bits in made], 1) - over
    torch.testing.assert_close(found, numbers(given, "int4"), rtol=0, atol=15 / 2**16)


def test_planes_of_mxfp4_are_a_power_of_two_off():
    given = words()
    made = run(unpacking.E2M1_PLANES.value, 8, given)
    found = torch.stack([floats(bits, torch.float32) for bits in made], 1) * 2.0**E2M1_SHIFT
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    wanted = torch.cat([levels, -levels])[(unpack(torch.from_numpy(given.view(np.int32).copy())[:, None]) + 8).int()]
    assert torch.equal(found, wanted) and torch.equal(found.signbit(), wanted.signbit())


def interpreted(text, constraints, args, dtype, is_pure, pack):
    """tl.inline_asm_elementwise for the interpreter, which holds bf16 as its bits."""
    assert constraints.count("=") == len(dtype) and len(constraints.split(",")) == len(dtype) + len(args)
    words = args[0].handle.data
    given = [np.broadcast_to(arg.handle.data, words.shape).reshape(-1).view(np.uint32) for arg in args]
    stored = {tl.bfloat16: np.uint16, tl.float16: np.float16, tl.float32: np.float32}
    made = run(text.value if hasattr(text, "value") else text, len(dtype), *given)
    blocks = [bits.view(stored[kind]).reshape(words.shape) for bits, kind in zip(made, dtype, strict=True)]
    return tuple(
        tl.tensor(TensorHandle(block, kind), tl.block_type(kind, list(words.shape)))
        for block, kind in zip(blocks, dtype, strict=True)
    )


# Every second case of a format, in either dtype by turns; ACCEL_TEST_EVERYTHING=1 runs each in both.
FORMATS = [[case for case in quantized_linear.cases if case.small and case.name.startswith(format)]
           for format in ("int8", "int4", "fp8")]  # fmt: skip
FORMATS.append([case for case in experts.cases if case.small and "mxfp4" in case.name])
CASES = [
    pytest.param(case, dtype, id=f"{case.name}-{dtype}")
    for cases in FORMATS
    for number, case in enumerate(cases)
    for turn, dtype in enumerate((torch.float16, torch.bfloat16))
    if number % 4 == 2 * turn or EVERYTHING
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
@pytest.mark.parametrize("case, dtype", CASES)
@pytest.mark.share(4)
@pytest.mark.turns(2)
def test_kernels_around_the_ptx_are_as_good_as_torch(case, dtype, as_good_as_torch, monkeypatch):
    monkeypatch.setattr(tl, "inline_asm_elementwise", interpreted)
    for kernels in (gemv_triton, skinny_triton, experts_triton):
        monkeypatch.setattr(kernels, "unpack_mode", lambda dtype: "rough" if dtype == torch.bfloat16 else "exact")
    args, kwargs = case.make(torch.device("cpu"), dtype)
    as_good_as_torch(quantized_linear if case in quantized_linear.cases else experts, args, kwargs, dtype)
