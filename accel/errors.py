"""Errors that users may catch, which errors of a trial end the call, and how the others are reported."""

import logging

import torch

__all__ = ["InUse", "PatchConflict", "RanksApart", "Refused", "SkippedSite"]

LOG = logging.getLogger("accel")
CUDA = ("CUDA error", "CUDA driver error", "CUDA out of memory", "[CUDA]", "CUBLAS_STATUS", "device-side assert")
MEMORY = ("out of memory", "ALLOC_FAILED")  # among those of CUDA


class Refused(ValueError):
    """What the call asks for cannot be done with this model. It is as it was before the call."""


class RanksApart(RuntimeError):
    """A rank that shares a model has failed, ended or was interrupted, and the others cannot go on without it.

    The message says which one and why, as far as it is known. Start all ranks anew.
    """


class SkippedSite(Refused):
    """strict=True, and a site would be left as stock; the message names it and the reason. The object is as it was."""


class PatchConflict(RuntimeError):
    """`accel.restore` found something that others have changed since `accel.optimize`, and would have thrown that away.

    The message names it. Nothing was undone: undo that change first, then call `accel.restore` again.
    """


class InUse(RuntimeError):
    """A call of the model on another thread did not end while `accel` waited to change it. The message names the
    thread. The model is as it was.
    """


class Unfit(Exception):
    """Why a call runs stock, found when it was under way."""


def fatal(error: BaseException) -> bool:
    """Whether nothing else should be tried: memory is short, the GPU failed, or the user must decide."""
    if not isinstance(error, Exception):  # KeyboardInterrupt, SystemExit
        return True
    if isinstance(error, Refused | RanksApart | InUse | MemoryError | torch.OutOfMemoryError | torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in CUDA)


def of_a_kernel(error: BaseException) -> bool:
    """Whether a kernel did not compile, which says nothing about the model or the call."""
    return type(error).__module__.partition(".")[0] == "triton"


def reason_of(error: BaseException, *, memory: bool = False) -> str:
    """`logged(error)`, for an error after which work goes on. Raises it if `fatal`.

    memory: running out of memory is not fatal, since the trial needs memory that stock does not.
    """
    if fatal(error) and not (memory and out_of_memory(error)):
        raise error
    return logged(error)


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the GPU or the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and fatal(error) and any(words in str(error) for words in MEMORY)


def logged(error: BaseException) -> str:
    """The error in one line, for a report; logs it with its traceback, at debug level.

    To be called by itself only where every error is an outcome, such as of a measurement or a capture.
    """
    LOG.debug("%s", error, exc_info=error)
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
