"""Weights of a block that streams, which code around the block reads while other bytes are where they belong."""

from collections.abc import Iterable
from itertools import repeat
from typing import Any
from weakref import proxy

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from accel.offload.blocks import pieces
from accel.offload.budget import WeightSizes, check_fits
from accel.offload.layout import storage_of
from accel.offload.piece import PlacedWeights, WeightPlacement

# What is asked of a tensor without its numbers.
ASKS = frozenset(
    "__get__ __set__ __hash__ __len__ size dim ndimension stride numel nelement element_size storage_offset data_ptr "
    "is_contiguous is_floating_point is_complex is_inference is_conj is_neg untyped_storage".split()
)


class OutsideReads(TorchFunctionMode):
    """Notes which weights of blocks are read outside of these blocks' calls, inside of a call of a new size.

    They are brought where they are read. diffusers' DiT embeds classes by its first block once more after the last.
    Behind the call all of them are for the card.
    """

    def __init__(self, streamed: Any):
        super().__init__()
        self.streamed = proxy(streamed)  # whose model is else freed late, by the collector of cycles
        self.inside = ""  # the path of the block that is called
        self.apart: set[int] = set()  # ids of what is not to stream
        self.found: set[int] = set()  # of these, since the call began
        self.homes: dict[int, tuple[int, PlacedWeights]] = {}  # of weights in the ring: number and piece
        self.ring: Any = None  # of the blocks in `homes`

    def streams(self, piece: PlacedWeights) -> bool:
        """Whether all of a piece may go on as it does."""
        return not piece.path or self.apart.isdisjoint(id(slot.tensor) for slot in piece.layout.slots)

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        streamed, kwargs, name = self.streamed, kwargs or {}, getattr(function, "__name__", "")
        if streamed.ring is None or streamed.stacks or not streamed.unknown or name in ASKS:
            return function(*args, **kwargs)
        if self.ring is not streamed.ring:
            self.ring, numbers = streamed.ring, streamed.numbers.values()
            self.homes = {id(slot.tensor): held for held in numbers for slot in held[1].layout.slots}
        given = {id(one): one for one in tree_leaves((args, kwargs)) if id(one) in self.homes}
        read = {key: one for key, one in given.items() if self.homes[key][1].path != self.inside}
        for number, piece in map(self.homes.__getitem__, read):
            piece.go(WeightPlacement.CARD)
            self.ring.take(number)
        made, special = function(*args, **kwargs), name.startswith("__")
        changes = name == "__setitem__" or name.startswith("__i") if special else name.endswith("_")
        for key, one in read.items() if changes else ():
            self.homes[key][1].keep(one)
        if read and self.inside:
            streamed.take_block(self.inside)  # which may have lain where these came to
        if read and (changes or not any(map(self._views, tree_leaves(made), repeat(read.values())))):
            self.found |= read.keys()
        return made

    def _views(self, made: Any, read: Iterable[torch.Tensor]) -> bool:
        """Whether it is a view of one of these, as our own code makes to find weights side by side."""
        return isinstance(made, torch.Tensor) and storage_of(made) in map(storage_of, read)

    def __exit__(self, kind: Any = None, *given: Any) -> None:
        """Raises Refused where what was read does not fit on the card too, rather than at the next call."""
        super().__exit__(kind, *given)
        self.inside, self.ring, self.homes = "", None, {}
        if self.found:
            self.apart |= self.found
            self.found = set()
            self.streamed.bring_back()
            if kind is None:
                self._check()

    def _check(self) -> None:
        model = self.streamed.model
        *blocks, (_, rest) = pieces(model, self.apart)
        sizes = WeightSizes(rest.nbytes, tuple(layout.nbytes for _, layout in blocks))
        check_fits(sizes, self.streamed.budget, type(model).__name__, self.streamed.beside())
