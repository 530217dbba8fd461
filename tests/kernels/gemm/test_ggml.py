"""Blocks of GGUF files: random bytes of every format, against gguf-py, diffusers and transformers, bit for bit."""

import pytest
import torch
from accel_kernels.gemm.blocks.block_weight import BlockWeight
from accel_kernels.gemm.blocks.ggml import GGML

from support.kernels.compiler import in_a_process
from support.kernels.ggml import random_blocks

ROWS, PER_ROW = 5, 6
FORMATS = pytest.mark.parametrize("name", GGML)
ALL = pytest.mark.share(1)


def weight(name: str, compute: torch.dtype) -> BlockWeight:
    format = GGML[name]
    data = random_blocks(format, ROWS * PER_ROW).reshape(ROWS, -1)
    return BlockWeight(data, PER_ROW * format.columns, format, compute)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit, the sign of zero too."""
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@ALL
@FORMATS
def test_as_gguf_py_in_float32(name):
    gguf = pytest.importorskip("gguf")
    held, kind = weight(name, torch.float32), gguf.GGMLQuantizationType[name]
    assert (kind, gguf.GGML_QUANT_SIZES[kind]) == (held.format.code, (held.format.columns, held.format.bytes))
    wanted = torch.from_numpy(gguf.quants.dequantize(held.data.numpy(), kind))
    assert same(held.dequantized(torch.float32), wanted)
    assert same(held.dequantized(torch.bfloat16), wanted.bfloat16())


@ALL
@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_as_diffusers_in_float16(name, dtype):
    gguf = pytest.importorskip("gguf")
    from diffusers.quantizers.gguf.utils import GGUFParameter, dequantize_gguf_tensor

    held = weight(name, torch.float16)
    wanted = dequantize_gguf_tensor(GGUFParameter(held.data, quant_type=gguf.GGMLQuantizationType[name]))
    assert same(held.dequantized(dtype), wanted.to(dtype))


@ALL
@FORMATS
def test_as_transformers(name):
    from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize

    if GGML[name].code not in GGML_BLOCK:  # it has fewer, up to 5.17 not half of them
        assert name not in ("Q8_0", "Q4_K", "Q6_K")
        return
    for dtype in (torch.float32, torch.float16):
        held = weight(name, dtype)
        assert same(held.dequantized(dtype), dequantize(held.data, held.format.code, dtype).reshape(held.shape))


COMPILE = """
import torch
from accel_kernels import BlockWeight, dequantize
from accel_kernels.gemm.blocks.ggml import GGML
from support.everything import EVERYTHING
from support.kernels.absent_gpu import GPU, absent_gpu

for arch, some in ((80, ("Q5_1",)), (90, ("Q3_K", "Q5_K")), (100, ("IQ4_XS",))):
    with absent_gpu(arch) as found:
        for name in GGML if EVERYTHING else some:
            for compute in (torch.float32, torch.float16)[not EVERYTHING :]:
                data = torch.empty(4, 2 * GGML[name].bytes, dtype=torch.uint8, device=GPU)
                held = BlockWeight(data, 2 * GGML[name].columns, GGML[name], compute)
                dequantize.triton(held, torch.float32)
    assert all(launch.compiled().asm["cubin"] for launch in found)
    print(len(found))
"""


@pytest.mark.turns(4)
def test_kernels_that_read_them_compile(tmp_path):
    assert min(map(int, in_a_process(COMPILE, tmp_path).split())) >= 1
