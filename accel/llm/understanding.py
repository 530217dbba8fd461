"""The word for what recognition could not make out."""

import torch


class NotUnderstood(Exception):
    """Why a model, or a part of it, keeps its stock forward; the message goes into the report."""


def raised(error: Exception) -> str:
    """What a model's own code raised, in a line for the report.

    Raises the error again where it says nothing about the model: memory that ran out, or a device that failed.
    """
    if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)):
        raise error
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
