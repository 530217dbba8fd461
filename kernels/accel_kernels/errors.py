"""Errors while backends and algorithms are tried: a GPU that has failed ends the call, the others are logged."""

import logging

import torch

LOG = logging.getLogger("accel_kernels")
# Of CUDA's errors those after which nothing runs any more. Others say that this card has no such kernel.
FAULTS = (
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "device-side assert",
    "launch failure",
    "launch timed out",
    "stack error",
    "invalid program counter",
    "uncorrectable ECC",
)


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the GPU or the host."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError)


def set_aside(error: BaseException) -> None:
    """The one way to go on after an error: its traceback is logged, at the level of debugging. Raises the error where
    the GPU has failed, or where it is for the user to decide.
    """
    if not isinstance(error, Exception) or any(words in str(error) for words in FAULTS):
        raise error
    LOG.debug("%s", error, exc_info=error)
