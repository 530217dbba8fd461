"""Gluon's names, which Triton 3.7 changed, and whether it is that version or a later one."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

all_threads = getattr(gl, "thread_barrier", None) or gl.barrier
start_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
start_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # without an underscore before it
