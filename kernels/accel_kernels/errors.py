"""Errors while backends and algorithms are tried: a GPU that has failed ends the call, the others are logged."""

import logging
import traceback

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
# Where Triton makes a kernel: where an assembler, a compiler of C or room on the disk is missing, any error is raised.
MAKING = ("triton.compiler", "triton.backends", "triton.knobs", "triton.runtime.build", "triton.runtime.cache")


class KernelRefused(RuntimeError):
    """The compiler, or the GPU, does not take a kernel as it is configured. kernel: its name."""

    def __init__(self, kernel: str, error: BaseException):
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        super().__init__(f"{kernel} was refused: {type(error).__name__}: {first}")
        self.kernel = kernel


def of_compiler(error: BaseException) -> bool:
    """Whether the error says that a kernel does not compile, fit or load, after which others run as before.

    Triton has classes for most; its passes and the driver raise RuntimeError, and what it calls whatever it likes.
    """
    if type(error).__module__.partition(".")[0] == "triton":
        return True
    words = str(error)
    if out_of_memory(error) or any(fault in words for fault in (*FAULTS, "out of memory")):
        return False
    if isinstance(error, RuntimeError) and ("PassManager::run failed" in words or "Triton Error [CUDA]" in words):
        return True
    frames = traceback.walk_tb(error.__traceback__)
    return any(str(frame.f_globals.get("__name__")).startswith(MAKING) for frame, _ in frames)


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the GPU or the host."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError)


def set_aside(error: BaseException) -> None:
    """The one way to go on after an error, which is logged; raised where the GPU failed or the user decides."""
    if not isinstance(error, Exception) or any(words in str(error) for words in FAULTS):
        raise error
    LOG.debug("%s", error, exc_info=error)
