"""The word for what recognition could not make out."""


class NotUnderstood(Exception):
    """Why a model, or a part of it, keeps its stock forward; the message goes into the report."""
