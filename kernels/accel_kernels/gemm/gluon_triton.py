"""Gluon's names, which Triton 3.7 changed, and tiles cut into blocks of columns."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

all_threads = getattr(gl, "thread_barrier", None) or gl.barrier
start_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
start_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # without an underscore before it


def tensor_map(matrix, height: int, width: int) -> TensorDescriptor:
    """Of boxes of so many rows and columns, of 8, 16 or 32 bits."""
    kind = {1: gl.int8, 2: gl.float16, 4: gl.int32}[matrix.element_size()]
    layout = gl.NVMMASharedLayout.get_default_for([height, width], kind)
    strides = [matrix.stride(0) if matrix.shape[0] > 1 else matrix.shape[1], 1]
    return TensorDescriptor(matrix, list(matrix.shape), strides, [height, width], layout)


@gluon.jit
def column_blocks(tile, COUNT: gl.constexpr):
    """(H, W) as a tuple of 1, 2 or 4 blocks of columns, in order."""
    found = (tile,)
    if COUNT > 1:
        found = _halves(tile)
    if COUNT > 2:
        found = _halves(found[0]) + _halves(found[1])
    return found


@gluon.jit
def _halves(tile):
    H: gl.constexpr = tile.shape[0]
    W: gl.constexpr = tile.shape[1]
    return gl.split(tile.reshape([H, 2, W // 2]).permute((0, 2, 1)))
