"""Errors of code that tries something: which end the call they happen in, and how the others are told."""

import logging

import torch

LOG = logging.getLogger("accel")
CUDA = ("CUDA error", "CUDA driver error", "CUDA out of memory", "[CUDA]", "CUBLAS_STATUS", "device-side assert")


class Refused(ValueError):
    """What the user asked for cannot be: no reason to leave a part out, but an error of his own call."""


def fatal(error: BaseException) -> bool:
    """Whether nothing else should be tried: memory is short, or the GPU has failed, and stock would fail too; or it is
    for the user to decide.
    """
    if isinstance(error, Refused | MemoryError | torch.OutOfMemoryError | torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in CUDA)


def told(error: BaseException) -> str:
    """The error in one line, for a report; with its traceback it goes to the log, at the level of debugging."""
    LOG.debug("%s", error, exc_info=error)
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
