"""Weights of a block that streams, which code around the block reads while other bytes are where they belong."""

from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from accel.offload.piece import PlacedWeights, WeightPlacement

# What is asked of a tensor without its numbers, or makes a view, as our own code does to find weights side by side.
ASKS = frozenset(
    "__get__ __set__ __hash__ __len__ size dim ndimension stride numel nelement element_size storage_offset data_ptr "
    "is_contiguous is_floating_point is_complex is_inference is_conj is_neg untyped_storage detach "
    "__getitem__ view reshape as_strided narrow split chunk unflatten flatten t transpose permute expand".split()
)


class OutsideReads(TorchFunctionMode):
    """Inside of a call of a new size, a block's weights are brought where a function reads them outside of its call, as
    diffusers' DiT embeds classes by its first block once more after the last. Behind it all of these are for the card.
    """

    def __init__(self, streamed: Any):
        super().__init__()
        self.streamed = streamed
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
        made = function(*args, **kwargs)
        for key, one in read.items() if name.endswith("_") else ():
            self.homes[key][1].keep(one)
        if read and self.inside:
            streamed.take_block(self.inside)  # which may have lain where these came to
        self.found |= read.keys()
        return made

    def __exit__(self, *given: Any) -> None:
        super().__exit__(*given)
        self.inside, self.ring, self.homes = "", None, {}
        if self.found:
            self.apart |= self.found
            self.found = set()
            self.streamed.bring_back()
