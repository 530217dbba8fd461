"""The word for what recognition could not make out."""

from accel.failure import fatal, told


class NotUnderstood(Exception):
    """Why a model, or a part of it, keeps its stock forward; the message goes into the report."""


def raised(error: Exception) -> str:
    """What a model's own code raised, in a line for the report. Raises the error again where it is fatal."""
    if fatal(error):
        raise error
    return told(error)
