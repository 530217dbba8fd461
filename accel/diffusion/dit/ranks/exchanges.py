"""Exchanges of heads for tokens (all-to-all) in a model's attention, with the copies around them in the same step.

Attention over a divided sequence (Ulysses; Jacobs et al., "DeepSpeed Ulysses", 2023) sends each rank its heads of all
tokens, and afterwards its tokens of all heads. A model's code copies what it sends and what it receives into another
order. Here the copies are part of the exchange. Exchanges of equal form that do not depend on each other are one: by a
kernel that writes into receive buffers, or by NCCL.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from accel_kernels.collective.exchange import ExchangeRoom, Layout, alike, room_for, unwritable
from torch.distributed import distributed_c10d as c10d

from accel.diffusion.dit.program import Program, Ref, TensorValue, TorchStep, refs
from accel.diffusion.dit.ranks.collectives import Collective
from accel.diffusion.dit.ranks.pieces import Pieces, sent_pieces
from accel.fusion.channels_last import copy_with_strides
from accel.parallel.ranks import Ranks

COLLECTIVE = "all_to_all_single"
EXCHANGE = "exchange"  # the name of the step
COPY = "contiguous"  # `clone` keeps the strides of what it takes


class Exchange(Collective):
    """Called with tensors of one form, (ranks, ...): piece r of each goes to rank r; gives what was received, for each.

    function, group: torch's collective and the name of the group, for calls without a receive buffer. strides: of each
    tensor, as it was recorded.
    """

    def __init__(self, function: Any, group: str, pieces: Pieces, strides: Sequence[tuple[int, ...]]):
        super().__init__(function)
        self.group, self.pieces, self.strides = group, pieces, tuple(strides)
        self.layouts = [pieces.layout(one) for one in self.strides]

    @property
    def ranks(self) -> Ranks:
        return Ranks.of(c10d._resolve_process_group(self.group))  # type: ignore[arg-type]

    @property
    def form(self) -> tuple:
        """Equal on ranks that exchange alike."""
        return self.pieces, self.strides

    def buffer_bytes(self, size: int) -> int:
        """Bytes of a receive buffer that its results take, of elements of so many bytes."""
        return room_for(len(self.strides), torch.Size(self.pieces.shape).numel(), size)

    def __call__(
        self, tensors: Sequence[torch.Tensor], buffer: ExchangeRoom | None = None, place: int = 0, waits: bool = True
    ) -> list[torch.Tensor]:
        """buffer, place, waits: see `ExchangeRoom.exchange`; without a buffer NCCL or gloo exchanges.

        Ranks must launch alike, and tensors may lie otherwise on one of them, where weights of one product lie apart.
        So what decides is how they were recorded, and what no launch can write is copied to lie so.
        """
        pieces, dtype = self.pieces, tensors[0].dtype
        tensors = [one.view(pieces.shape) for one in tensors]
        if buffer is None or not _together(dtype, self.layouts):
            return [self._by_library(one) for one in tensors]
        layouts = [pieces.layout(one.stride()) for one in tensors]
        if not _together(dtype, layouts):
            tensors = [copy_with_strides(*one) for one in zip(tensors, self.strides, strict=True)]
            layouts = self.layouts
        return [one.view(pieces.target) for one in buffer.exchange(tensors, layouts, place, waits)]

    def _by_library(self, tensor: torch.Tensor) -> torch.Tensor:
        pieces, ranks, count = self.pieces, self.pieces.shape[0], self.pieces.numel
        sent, even = tensor.contiguous().view(-1), [count] * ranks
        came = torch.ops._c10d_functional.wait_tensor(self.function(sent, even, even, self.group))
        axes = (pieces.ranks, *pieces.inside)
        found = torch.empty(pieces.target, dtype=tensor.dtype, device=tensor.device)
        sizes, strides = zip(*((one.size, one.target) for one in axes), strict=True)
        found.as_strided(sizes, strides).copy_(came.view(sizes))
        return found


def _together(dtype: torch.dtype, layouts: Sequence[Layout]) -> bool:
    """Whether one launch can write tensors that lie so."""
    return alike(layouts) and not any(unwritable(dtype, one) for one in layouts)


def with_exchanges(program: Program) -> Program:
    """The program with one step for each exchange of equal pieces, in place of copies and a collective."""
    search = _Search(program)
    found = [one for place in range(len(program.steps)) if (one := search.at(place)) is not None]
    if not found:
        return program
    steps: dict[int, TorchStep | None] = dict(enumerate(program.steps))
    for group in search.grouped(found):
        first = group[0]
        for one in group:
            steps[one.place] = None
        exchange = Exchange(first.function, first.group, first.pieces, [one.strides for one in group])
        sources, targets = [Ref(one.source) for one in group], [Ref(one.target) for one in group]
        steps[first.place] = TorchStep(exchange, EXCHANGE, (sources,), {}, targets)
    return _needed(replace(program, steps=[step for step in steps.values() if step is not None]))


class _Found(NamedTuple):
    """function, group, pieces, strides: see `Exchange`. source, target: the values that are sent and that have come.
    Places of steps: place, of what makes the target; collective; made, of what makes the source, -1 for what is given.
    """

    function: Callable
    group: str
    pieces: Pieces
    strides: tuple[int, ...]
    source: int
    target: int
    place: int
    collective: int
    made: int


class _Search:
    def __init__(self, program: Program):
        self.steps, self.values = program.steps, program.values
        self.users, self.makers = program.users(), program.makers()
        self.returned = {self.values[number].base for number in refs(program.result)}

    def at(self, place: int) -> _Found | None:
        """The exchange whose collective has this place, if it is one."""
        step = self.steps[place]
        if type(step.function) is not Collective or step.name != COLLECTIVE or step.kwargs or len(step.args) != 4:
            return None
        given, sizes, group = step.args[0], step.args[1:3], step.args[3]
        if not isinstance(given, Ref) or not isinstance(step.result, Ref) or not isinstance(group, str):
            return None
        sent, came, ranks = self.values[given.number], self.values[step.result.number], len(sizes[0] or ())
        if ranks < 2 or any(list(one or ()) != [sent.numel // ranks] * ranks for one in sizes):
            return None
        if sent.pinned or came.pinned or len(sent.shape) != 1 or came.shape != sent.shape:
            return None
        source = self._before(sent, ranks)
        piece = sent.numel // ranks
        shape, strides = ((ranks, piece), (piece, 1)) if source is sent else (source.shape, source.stride)
        target, last, pieces = self._after(came, place, shape)
        if pieces is None or self.values[target].base in self.returned or self.values[target].pinned:
            return None
        made = self.makers.get(source.number, -1)
        return _Found(step.function.function, group, pieces, strides, source.number, target, last, place, made)

    def _before(self, sent: TensorValue, ranks: int) -> TensorValue:
        """What is copied to be sent, piece after piece; the value itself where it is no such copy."""
        copy = self.makers.get(sent.base)
        if copy is None or not _copies(self.steps[copy]):
            return sent
        source, copied = self.values[self.steps[copy].taken[0]], self.values[sent.base]
        whole = copied.numel == sent.numel and copied.shape == source.shape
        return source if whole and not source.pinned and source.shape[:1] == (ranks,) else sent

    def _after(self, came: TensorValue, place: int, shape: tuple[int, ...]) -> tuple[int, int, Pieces | None]:
        """The value that an exchange of this shape may give, the place of the step that makes it, and its pieces: the
        copy of what has come, where nothing else takes that and the copy is not returned; else what has come.
        """
        views = [value.number for value in self.values if value.base == came.number]
        takers = {user for number in views for user in self.users[number] if self._takes(user, came.number)}
        if len(takers) == 1 and came.number not in self.returned:
            (user,) = takers
            copy = self.steps[user]
            if _copies(copy) and copy.made[0] not in self.returned:
                view = self.values[copy.taken[0]]
                pieces = sent_pieces(shape, view.shape, view.stride) if view.offset == 0 else None
                if pieces is not None:
                    return copy.made[0], user, pieces
        return came.number, place, sent_pieces(shape, came.shape, (1,))

    def _takes(self, user: int, base: int) -> bool:
        """Whether a step does more than to make views of this memory."""
        return any(self.values[made].base != base for made in self.steps[user].made)

    def grouped(self, found: list[_Found]) -> list[list[_Found]]:
        """Those of one form that follow each other, nothing sent in between, all sources there before the first."""
        known = {one.collective for one in found}
        others = [
            place
            for place, step in enumerate(self.steps)
            if isinstance(step.function, Collective) and place not in known
        ]
        groups: list[list[_Found]] = []
        for one in found:
            last = groups[-1] if groups else None
            if (
                last is not None
                and self._form(last[0]) == self._form(one)
                and one.made < last[0].place
                and not any(last[-1].collective < place < one.collective for place in others)
            ):
                last.append(one)
            else:
                groups.append([one])
        return groups

    def _form(self, one: _Found) -> tuple:
        value = self.values[one.source]
        return one.group, one.pieces, value.dtype, value.device


def _copies(step: TorchStep) -> bool:
    """Whether it makes a dense copy of what it takes."""
    plain = len(step.args) == 1 and isinstance(step.args[0], Ref) and not step.kwargs
    return step.name == COPY and plain and isinstance(step.result, Ref)


def _needed(program: Program) -> Program:
    """Without steps whose results nothing takes."""
    taken, kept = set(refs(program.result)), []
    for step in reversed(program.steps):
        if step.writes or not taken.isdisjoint(step.made):
            kept.append(step)
            taken.update(step.taken)
    return replace(program, steps=kept[::-1])
