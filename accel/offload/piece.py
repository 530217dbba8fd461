"""Weights that lie side by side, and the places that they go to and fro."""

import enum

import torch
from torch import nn

from accel.errors import logged
from accel.offload.layout import Layout, as_ordinary, become, form_of, views, weights_in
from accel.offload.memory import HostBuffer


class WeightPlacement(enum.Enum):
    """Where weights are: on the GPU; there during their call; on the CPU, where kernels read them; on the CPU."""

    CARD = "card"
    RING = "ring"
    PINNED = "pinned"
    HOST = "host"


class PlacedWeights:
    """Weights of one block, or of none, that lie side by side: from now on in these bytes of a buffer on the CPU, None
    for one of their own.
    """

    def __init__(self, path: str, layout: Layout, host: HostBuffer | None = None, start: int = 0):
        self.path, self.layout, self.placement = path, layout, WeightPlacement.HOST
        self.host = HostBuffer(layout.nbytes) if host is None else host
        self.start, self.end = start, start + layout.nbytes
        self.bytes = self.host.bytes[start : start + layout.nbytes]
        # Of each: the tensor, the view of that place, its form.
        self.places: dict[WeightPlacement, list[tuple[torch.Tensor, torch.Tensor, tuple]]] = {}
        layout.pack(self.bytes)
        self.put(WeightPlacement.HOST, self.bytes)

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    @property
    def pinned(self) -> bool:
        """Whether a GPU copies it by itself."""
        return self.end <= self.host.pinned_bytes

    def on_device(self, device: torch.device) -> torch.Tensor | None:
        """Its bytes as kernels read them where they are; None where they cannot."""
        if device.type != "cpu" and not self.pinned:
            return None
        try:
            return self.host.on_device(device)[self.start : self.end]
        except RuntimeError as error:
            logged(error)
            return None

    def row(self, device: torch.device) -> tuple[str, str, str]:
        """(path, placement, note) for the report."""
        slow = ", not pinned: copied by the CPU" if device.type == "cuda" and not self.pinned else ""
        return self.path, self.placement.value, f"{self.nbytes / 1e6:,.1f} MB{slow}"

    def intact(self, present: set[int]) -> bool:
        """Whether all its weights are among these, by id, and on the CPU where they were put."""
        return all(id(slot.tensor) in present and slot.lies_in(self.bytes) for slot in self.layout.slots)

    def put(self, name: WeightPlacement, whole: torch.Tensor, apart: bool = False) -> None:
        """Its place of this name, HOST or CARD, is these bytes. apart: see `views`."""
        with as_ordinary():
            placed = views(self.layout.slots, whole, apart)
            self.places[name] = [(slot.tensor, one, form_of(one)) for slot, one in placed]

    def go(self, name: WeightPlacement, before: WeightPlacement | None = None) -> None:
        """Its weights are views of that place. before: but for those that somebody has taken from where they were."""
        olds = self.places[name if before is None else before]
        with as_ordinary():
            for (tensor, view, _), (*_, old) in zip(self.places[name], olds, strict=True):
                if (form_of(tensor) == old) == (before is None):
                    continue
                become(tensor, view)

    def keep(self, tensor: torch.Tensor) -> None:
        """Somebody has changed this weight on the card, where its bytes are for a while."""
        with as_ordinary():
            for (one, view, _), (_, host, _) in zip(
                self.places[WeightPlacement.CARD], self.places[WeightPlacement.HOST], strict=True
            ):
                if one is tensor:
                    host.copy_(view)

    def bring_back(self, changed: bool) -> None:
        """From the card to the CPU. changed: what it holds there may be something else."""
        if changed and self.placement is WeightPlacement.CARD:
            with as_ordinary():
                for (tensor, view, form), (_, host, _) in zip(
                    self.places[WeightPlacement.CARD], self.places[WeightPlacement.HOST], strict=True
                ):
                    if form_of(tensor) == form:
                        host.copy_(view)
        if WeightPlacement.CARD in self.places:
            self.go(WeightPlacement.HOST, WeightPlacement.CARD)
        self.places = {WeightPlacement.HOST: self.places[WeightPlacement.HOST]}
        self.placement = WeightPlacement.HOST


def laid_anew(
    pieces: list[PlacedWeights], kept: list[PlacedWeights], tensors: list[torch.Tensor], apart: set[int]
) -> list[tuple[str, Layout]]:
    """By path the layouts in the place of pieces that are not kept, and of tensors that are in none, of path "", as are
    those apart, by id.
    """
    present = {id(one): one for one in tensors}
    touched = [(piece.path, piece.layout.slots) for piece in pieces if piece not in kept]
    stay = present.keys() - apart
    found = [(path, [slot.tensor for slot in slots if id(slot.tensor) in stay]) for path, slots in touched]
    for piece in pieces:
        for slot in piece.layout.slots:
            if piece in kept or id(slot.tensor) in stay:
                present.pop(id(slot.tensor), None)
    return [(path, Layout(held)) for path, held in (*found, ("", list(present.values()))) if held]


def blocks_moved(model: nn.Module, pieces: list[PlacedWeights]) -> bool:
    """Whether blocks have other places in the model than they had, or are gone."""
    for piece in pieces:
        try:
            there = {id(one) for one in weights_in(model.get_submodule(piece.path))}
        except AttributeError:
            return True
        if not any(id(slot.tensor) in there for slot in piece.layout.slots):
            return True
    return False


def where_left(pieces: list[PlacedWeights], tensors: list[torch.Tensor]) -> bool:
    """Whether these are the weights of the pieces, where they are between two calls."""
    if {id(tensor) for piece in pieces for tensor, *_ in piece.places[WeightPlacement.HOST]} != set(map(id, tensors)):
        return False
    for piece in pieces:
        moves = piece.placement is WeightPlacement.RING
        places = piece.places[WeightPlacement.HOST if moves else WeightPlacement.CARD]
        if any(form_of(tensor) != form for tensor, _, form in places):
            return False
    return True
