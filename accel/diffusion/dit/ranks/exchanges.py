"""Exchanges of heads for tokens, as a model's attention has them, with the copies around them as part of them.

Attention over a divided sequence (Ulysses; Jacobs et al., "DeepSpeed Ulysses", 2023) sends each rank its heads of all
tokens, and afterwards its tokens of all heads. A model's code copies what it sends into the order of the pieces, and
what has come into the order it goes on with. Here both are part of one step, and exchanges of equal form that do not
wait for each other are one: by a kernel that writes into a room of each rank, or by the library.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from accel_kernels.collective.exchange import ExchangeRoom, alike, room_for, unwritable
from torch.distributed import distributed_c10d as c10d

from accel.diffusion.dit.program import Program, Ref, TorchStep, refs
from accel.diffusion.dit.ranks.collectives import Collective
from accel.diffusion.dit.ranks.pieces import Pieces, sent_pieces
from accel.parallel.ranks import Ranks

COLLECTIVE = "all_to_all_single"
EXCHANGE = "exchange"  # the name of the step
COPIES = ("contiguous", "clone")


class Exchange(Collective):
    """Called with tensors of one form, (ranks, ...): piece r of each goes to rank r; gives what has come, for each.

    function, group: torch's collective and the name of the group, by which it runs without a room.
    """

    def __init__(self, function: Any, group: str, pieces: Pieces):
        super().__init__(function)
        self.group, self.pieces = group, pieces

    @property
    def ranks(self) -> Ranks:
        return Ranks.of(c10d._resolve_process_group(self.group))  # type: ignore[arg-type]

    @property
    def form(self) -> tuple:
        """Equal for exchanges of the same form."""
        return self.group, self.pieces

    def room(self, tensors: int, size: int) -> int:
        """Bytes of a room that results take, of so many tensors of numbers of so many bytes."""
        return room_for(tensors, torch.Size(self.pieces.shape).numel(), size)

    def __call__(
        self, tensors: Sequence[torch.Tensor], room: ExchangeRoom | None = None, place: int = 0, waits: bool = True
    ) -> list[torch.Tensor]:
        """room, place, waits: see `ExchangeRoom.exchange`; without a room by the library."""
        pieces = self.pieces
        tensors = [one.view(pieces.shape) for one in tensors]
        layouts = [pieces.layout(one.stride()) for one in tensors]
        if room is None or any(unwritable(*one) for one in zip(tensors, layouts, strict=True)):
            return [self._by_library(one) for one in tensors]
        if alike(layouts):
            came = room.exchange(tensors, layouts, place, waits)
        else:
            each, given = self.room(1, tensors[0].element_size()), zip(tensors, layouts, strict=True)
            came = [room.exchange([x], [layout], place + i * each, waits)[0] for i, (x, layout) in enumerate(given)]
        return [one.view(pieces.target) for one in came]

    def _by_library(self, tensor: torch.Tensor) -> torch.Tensor:
        pieces, ranks, count = self.pieces, self.pieces.shape[0], self.pieces.numel
        sent, even = tensor.contiguous().view(-1), [count] * ranks
        came = torch.ops._c10d_functional.wait_tensor(self.function(sent, even, even, self.group))
        axes = (pieces.ranks, *pieces.inside)
        found = torch.empty(pieces.target, dtype=tensor.dtype, device=tensor.device)
        sizes, strides = zip(*((one.size, one.target) for one in axes), strict=True)
        found.as_strided(sizes, strides).copy_(came.view(sizes))
        return found


def with_exchanges(program: Program) -> Program:
    """The program with a step for each exchange of equal pieces, instead of copies and a collective."""
    users, makers = program.users(), program.makers()
    found = [
        one for place in range(len(program.steps)) if (one := _Found.at(program, users, makers, place)) is not None
    ]
    if not found:
        return program
    steps: dict[int, TorchStep | None] = dict(enumerate(program.steps))
    for group in _grouped(found, program):
        first = group[0]
        for one in group:
            steps[one.place] = None
        sources, targets = [Ref(one.source) for one in group], [Ref(one.target) for one in group]
        steps[first.place] = TorchStep(first.exchange, EXCHANGE, (sources,), {}, targets)
    return _needed(replace(program, steps=[step for step in steps.values() if step is not None]))


class _Found:
    """An exchange: the value that is sent, that which has come, and the place of the step that makes this."""

    def __init__(self, exchange: Exchange, source: int, target: int, place: int, collective: int, made: int):
        self.exchange, self.source, self.target, self.place = exchange, source, target, place
        self.collective, self.made = collective, made  # places of the collective, and of what makes the source

    @classmethod
    def at(cls, program: Program, users: dict, makers: dict, place: int) -> "_Found | None":
        """The one whose collective has this place, if it is one."""
        step, values = program.steps[place], program.values
        if type(step.function) is not Collective or step.name != COLLECTIVE or step.kwargs or len(step.args) != 4:
            return None
        given, result, *splits, group = step.args[0], step.result, *step.args[1:]
        if not isinstance(given, Ref) or not isinstance(result, Ref) or not isinstance(group, str):
            return None
        sent, came = values[given.number], values[result.number]
        ranks = len(splits[0] or ())
        if ranks < 2 or any(list(one or ()) != [sent.numel // ranks] * ranks for one in splits):
            return None
        if sent.pinned or came.pinned or len(sent.shape) != 1 or came.shape != sent.shape:
            return None
        source, shape = given.number, (ranks, sent.numel // ranks)
        copied = program.steps[makers[sent.base]] if sent.base in makers else None
        if copied is not None and copied.name in COPIES and _plain(copied) and values[sent.base].numel == sent.numel:
            before = values[copied.taken[0]]
            if before.shape[0] == ranks and not before.pinned and before.shape == values[sent.base].shape:
                source, shape = before.number, before.shape
        returned = {values[number].base for number in refs(program.result)}
        views = [value.number for value in values if value.base == came.number]
        takers = {user for number in views for user in users[number]}
        takers = {user for user in takers if any(values[made].base != came.number for made in program.steps[user].made)}
        target, last = came.number, place
        pieces = sent_pieces(shape, came.shape, (1,))
        if len(takers) == 1 and came.number not in returned:
            (user,) = takers
            after = program.steps[user]
            view = values[after.taken[0]] if after.name in COPIES and _plain(after) else None
            if view is not None and view.offset == 0 and view.base == came.number and after.made[0] not in returned:
                whole = sent_pieces(shape, view.shape, view.stride)
                if whole is not None:
                    pieces, target, last = whole, after.made[0], user
        if pieces is None or values[target].base in returned or values[target].pinned:
            return None
        made = makers.get(source, -1)
        return cls(Exchange(step.function.function, group, pieces), source, target, last, place, made)


def _plain(step: TorchStep) -> bool:
    return len(step.args) == 1 and isinstance(step.args[0], Ref) and not step.kwargs and isinstance(step.result, Ref)


def _grouped(found: list[_Found], program: Program) -> list[list[_Found]]:
    """Those that follow each other, with nothing sent in between, and whose sources are there before the first."""
    groups: list[list[_Found]] = []
    between = [place for place, step in enumerate(program.steps) if isinstance(step.function, Collective)]
    known = {one.collective for one in found}
    values = program.values
    for one in found:
        last = groups[-1] if groups else None
        alike = last is not None and (
            last[0].exchange.form == one.exchange.form
            and values[last[0].source].dtype == values[one.source].dtype
            and values[last[0].source].device == values[one.source].device
            and one.made < last[0].place
            and not any(last[-1].collective < place < one.collective and place not in known for place in between)
        )
        if alike and last is not None:
            last.append(one)
        else:
            groups.append([one])
    return groups


def _needed(program: Program) -> Program:
    """Without steps whose results nothing takes."""
    taken, kept = set(refs(program.result)), []
    for step in reversed(program.steps):
        if step.writes or not taken.isdisjoint(step.made):
            kept.append(step)
            taken.update(step.taken)
    return replace(program, steps=kept[::-1])
