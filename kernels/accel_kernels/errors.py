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


class KernelRefused(RuntimeError):
    """The compiler, or the GPU, does not take a kernel as it is configured. kernel: its name."""

    def __init__(self, kernel: str, error: BaseException):
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        super().__init__(f"{kernel} was refused: {type(error).__name__}: {first}")
        self.kernel = kernel


def of_compiler(error: BaseException) -> bool:
    """Whether the error says that a kernel does not compile, fit or load, after which others run as before.

    Triton has classes for most; its passes and the driver raise RuntimeError.
    """
    if type(error).__module__.partition(".")[0] == "triton":
        return True
    words = str(error)
    told = "PassManager::run failed" in words or ("Triton Error [CUDA]" in words and "out of memory" not in words)
    return isinstance(error, RuntimeError) and told and not any(fault in words for fault in FAULTS)


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
