"""How much memory a model may take, and which of its blocks stay on the card within it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple
from weakref import WeakSet

from accel.errors import Refused

BUFFERS = 2  # of the ring: one is read while the other is filled
MARGIN = 1.15  # of the memory that a call was seen to need: a graph keeps it in other pieces
ROOM_FOR_CALLS = 0.75  # of the budget, that weights may take which are on the card as a whole
FAR = 4  # times; by reckoning, a step in which a GB streams takes five times as long as one without
SLACK = 256 * 2**20  # bytes: workspaces of libraries, kernels that are loaded on the way


@dataclass(frozen=True)
class Budget:
    """card: bytes of the GPU that weights and all else may take together. host: bytes of RAM that may be pinned, None
    for all. placed: the `PlacedModel`s that share both, of one pipeline; copies have others.
    """

    card: int
    host: int | None = None
    placed: WeakSet = field(default_factory=WeakSet, compare=False, repr=False)

    def __reduce__(self) -> tuple:
        return Budget, (self.card, self.host)

    def too_little(self, name: str, weights: int, needed: str) -> str:
        """That a call goes beyond it. weights: bytes of them on the card; needed: what it needs beside these."""
        return (
            f"memory={self.card / 1e9:.2f} GB: a call of this {name} needs {needed} beside the {weights / 1e9:.2f} GB "
            "of its weights that are on the GPU at once: allow more, or give it less at a time"
        )


class Measured(NamedTuple):
    """What calls were seen to need. size: elements of their inputs. nbytes: of memory beside the weights."""

    size: int
    nbytes: int


class WeightSizes(NamedTuple):
    """Bytes of a model's weights. rest: what stays on the card in any case. blocks: the others, in the order called.

    experts: in each block, where blocks are stacks of experts, of which some stay on the card while all stream; else 0.
    """

    rest: int
    blocks: tuple[int, ...]
    experts: int = 0

    @property
    def total(self) -> int:
        return self.rest + sum(self.blocks)

    def least(self) -> int:
        """On the card while every block streams."""
        return self.on_card(tuple(range(len(self.blocks))))

    def on_card(self, streamed: Sequence[int], copies: int = 0) -> int:
        """Bytes on the card while these blocks come through the ring. copies: of experts of each that are there too."""
        ring = min(BUFFERS, len(streamed)) * max((self.blocks[i] for i in streamed), default=0)
        return self.total - self.moved(streamed) + ring + copies * self.moved(streamed) // max(1, self.experts)

    def copies(self, streamed: Sequence[int], room: int) -> int:
        """Of experts of each block, that fit in these bytes too."""
        each = self.moved(streamed) // max(1, self.experts)
        return max(0, min(self.experts, (room - self.on_card(streamed)) // each)) if self.experts and each else 0

    def beside(self, room: int, wanted: int = 0) -> int:
        """Of these bytes, for what is kept from call to call: what all weights leave, or half of what need not be
        theirs if that is far more: so many more requests outweigh that blocks stream. wanted: bytes of one request.
        """
        left, half = room - self.total, (room - self.least()) // 2
        return max(0, left if left >= wanted and FAR * left >= half else max(left, half))

    def moved(self, streamed: Sequence[int]) -> int:
        """Bytes that come to the card in each call."""
        return sum(self.blocks[i] for i in streamed)


def evenly(count: int, number: int) -> tuple[int, ...]:
    """So many of 0 ... number - 1, evenly, so that each has the work of others to hide behind."""
    return tuple((2 * i + 1) * number // (2 * count) for i in range(count))


def streamed_blocks(sizes: WeightSizes, room: int) -> tuple[int, ...]:
    """The blocks that stream: as few bytes as fit in these. All of them where nothing fits, and of experts."""
    number = len(sizes.blocks)
    choices = (evenly(k, number) for k in range(1 if sizes.experts else number))
    fitting = (streamed for streamed in choices if sizes.on_card(streamed) <= room)
    return min(fitting, key=sizes.moved, default=tuple(range(number)))


def room_for_weights(card: int, beside: int) -> int:
    """Bytes, of these on a card, that are left by a call that was seen to need so many beside the weights."""
    return card - int(MARGIN * beside) - SLACK


def check_fits(sizes: WeightSizes, budget: Budget, name: str, beside: int = 0) -> None:
    """Raises Refused where the weights that must be on the card at once do not fit, with so many bytes beside them."""
    if (least := sizes.least() + beside + SLACK) > budget.card:
        needs = f"{ceil(least / 1e7) / 100:.2f} GB for the weights that are on the GPU at once, and more for a call"
        raise Refused(f"memory={budget.card / 1e9:.2f} GB: a {name} needs {needs}")


def predicted_seconds(sizes: WeightSizes, streamed: Sequence[int], flops: float, bus: float, rate: float) -> float:
    """Of one call. flops: of it. bus: bytes a second from pinned memory. rate: operations a second.

    Copies hide behind the blocks between them, but for the first one, which all wait for.
    """
    compute, copies = flops / rate, sizes.moved(streamed) / bus
    ahead = streamed[0] / len(sizes.blocks) * compute if streamed else 0.0
    first = max(0.0, sizes.blocks[streamed[0]] / bus - ahead) if streamed else 0.0
    return max(compute + first, copies + compute / max(1, len(sizes.blocks)))
