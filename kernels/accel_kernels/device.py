"""What kernels and their launchers know of a GPU: its size, its features, and whether it is Triton's interpreter."""

import os
from functools import lru_cache

import torch

# Compute capabilities. bfloat16 is multiplied from the first on, float8_e4m3fn converted from the second on. Hopper has
# the tensor memory accelerator and programmatic dependent launch, as later ones have, and products of warpgroups.
AMPERE, FLOAT8, HOPPER = (8, 0), (8, 9), (9, 0)
INTERPRETER_SMS = 4  # of the interpreter, which runs on CPU tensors; any number gives the same results


@lru_cache(maxsize=16)
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device."""
    if device.type != "cuda":
        return INTERPRETER_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=16)
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have."""
    if device.type != "cuda":
        return 160 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]


def reaches(device: torch.device, least: tuple[int, int]) -> bool:
    """Whether this is a CUDA device of this compute capability or a later one."""
    return device.type == "cuda" and capability(device) >= least


def is_hopper(device: torch.device) -> bool:
    """Whether this is a CUDA device of compute capability 9.0: no other generation has its warpgroup products."""
    return device.type == "cuda" and capability(device) == HOPPER


def float8_reason(device: torch.device, *dtypes: torch.dtype) -> str | None:
    """Why a GPU cannot convert these dtypes, if float8_e4m3fn is among them."""
    if torch.float8_e4m3fn in dtypes and device.type == "cuda" and capability(device) < FLOAT8:
        return "float8 below compute capability 8.9"
    return None


def tma_reason(device: torch.device) -> str | None:
    """Why a GPU has no tensor memory accelerator."""
    if device.type == "cuda" and capability(device) < HOPPER:
        return "a GPU without a tensor memory accelerator (compute capability below 9.0)"
    return None


def programmatic(device: torch.device, wanted: bool = True) -> dict[str, bool]:
    """A kernel's constant PDL, and the option of a programmatic dependent launch where it is wanted and the GPU has it.

    The GPU has it from compute capability 9.0 on.

    Such a kernel starts while the one before it still runs. It first lets the next one start (gdc_launch_dependents)
    and loads weights, which no kernel writes. Then it waits for the one before it (gdc_wait). Every program must wait
    before it ends, also one without work, or a later kernel could overtake an earlier one.
    """
    return {"PDL": True, "launch_pdl": True} if wanted and reaches(device, HOPPER) else {"PDL": False}


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which knows no Gluon."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def upcast(dtype: torch.dtype) -> bool:
    """Whether operands become float32 before a product: Triton's interpreter multiplies bfloat16 as integers."""
    return interpreted() and dtype == torch.bfloat16
