"""What is known of one tensor, kept on the tensor itself, so that it is freed with it and needs no lookup."""

from collections import OrderedDict

import torch

NOTES = "_accel_notes"  # the one attribute that accel puts on tensors
Outputs = dict[int, torch.Tensor]  # of linear layers, by their ids


class TensorNotes:
    """Notes on one tensor. Those that describe its values are void once it is changed in place.

    version: of the tensor whose values they describe; None where no note does. host: the same on the CPU.
    channel_stats: of an image, as returned by the pass that wrote it. outputs: of linears with this input, each still
    to be taken once. taker: the thread and forward that may take them. kept: outputs that stay when the tensor changes,
    until whoever changes it writes them anew.
    """

    # Of the class until they are set: one is made for every image, and most hold a single note.
    host: torch.Tensor | None = None
    channel_stats: object | None = None
    taker: tuple[int, int] | None = None
    outputs: Outputs | None = None
    kept: Outputs | None = None

    def __init__(self, version: int | None):
        self.version = version

    def __reduce__(self) -> tuple[type, tuple]:
        """A copy or a file of the tensor has no notes, and `torch.load(weights_only=True)` reads it."""
        return OrderedDict, ()

    @staticmethod
    def on(x: torch.Tensor) -> "TensorNotes | None":
        """All there are, whatever has become of x since."""
        notes = vars(x).get(NOTES)
        return notes if type(notes) is TensorNotes else None

    @staticmethod
    def valid(x: torch.Tensor) -> "TensorNotes | None":
        """Notes on the present values of x; None where x has none, or was changed since."""
        notes = vars(x).get(NOTES)
        if type(notes) is TensorNotes and notes.version is not None and notes.version == x._version:
            return notes
        return None

    @staticmethod
    def begin(x: torch.Tensor) -> "TensorNotes":
        """As `valid`, but where there are none x has new ones. x: not an inference tensor, which knows no version."""
        attributes, version = vars(x), x._version
        before = attributes.get(NOTES)
        if type(before) is TensorNotes and before.version == version:
            return before
        notes = attributes[NOTES] = TensorNotes(version)
        if type(before) is TensorNotes:
            notes.kept = before.kept
        return notes

    @staticmethod
    def keep(x: torch.Tensor) -> Outputs:
        """Its `kept`, to be added to."""
        notes = TensorNotes.on(x)
        if notes is None:
            notes = vars(x)[NOTES] = TensorNotes(None)
        if notes.kept is None:
            notes.kept = {}
        return notes.kept
