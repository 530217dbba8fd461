"""One model of which a part lies on the GPU, while its other blocks come there in turns, as they are called."""

import threading
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate

import torch
from accel_kernels.capture import stream_of_its_own
from torch import nn

from accel.libraries.adapters import unmerge_disabled
from accel.offload.blocks import brought_by_another, check_whole, experts_in, pieces, still_placed
from accel.offload.budget import BUFFERS, Budget, Measured, WeightSizes, check_fits, room_for_weights, streamed_blocks
from accel.offload.call_hooks import calls_checked, hook_blocks, hook_model, streamed_model, unhook
from accel.offload.hot_experts import ExpertTables, HotExperts, stacks_in
from accel.offload.layout import CPU, as_ordinary, unmovable, weights_in
from accel.offload.memory import PAGE, HostBuffer
from accel.offload.outside_reads import OutsideReads
from accel.offload.piece import PlacedWeights, WeightPlacement, blocks_moved, laid_anew, where_left
from accel.offload.placed_model import ROW, PlacedModel, sums
from accel.offload.ring import Ring
from accel.patching.fast_forward import FastForward

GRAIN = 8 * ROW  # bytes of which sums are taken
MEASURING = threading.Lock()  # held in a call that is measured: the peak is the process's, and begins anew for one


class StreamedModel(PlacedModel):
    """As many of its weights as the budget allows stay on the GPU; other blocks come through a `Ring`.

    Outside of calls the weights of these are on the CPU, where others may read and change them. The first call of a
    size streams every block, and tells how much memory a call needs; what is left of the budget is for blocks.
    alone: no hook of accelerate's moves it, so it comes to the GPU at its first call and stays.
    """

    copied: tuple[str, ...] = (*PlacedModel.copied, "alone")
    budget: Budget

    def __init__(self, model: nn.Module, device: torch.device, prepare: Callable, budget: Budget, alone: bool = False):
        self.alone = alone
        super().__init__(model, device, prepare, budget)
        hook_model(self)

    def renew(self) -> None:
        super().renew()
        self.reads = OutsideReads(self)
        self.plans: list | None = None  # of the model and its parts, by which the pieces were made; None if unknown
        self.order: list[str] = []  # of blocks, by path, as they were called
        self.streamed: tuple[int, ...] | None = None  # numbers of blocks, by `order`, as they are placed now
        self.numbers: dict[str, tuple[int, PlacedWeights]] = {}  # of those in the ring, by path
        self.ring: Ring | None = None
        self.stacks: dict[str, FastForward] = {}  # by path, where blocks are experts: what reads these
        self.copies = 0  # of experts of each block, that are on the card too
        self.hot: HotExperts | None = None
        self.tables: ExpertTables | None = None
        self.arena: torch.Tensor | None = None  # on the GPU
        self.measured: dict[str, Measured] = {}  # by path, of parts that were called by themselves; "" is the model
        self.measuring: tuple[int, int, int] | None = None  # size of the call; bytes allocated, calls checked before
        self.seen: list[str] | None = None  # blocks called in it
        self.due = False  # blocks are to be chosen anew
        self.on_card = self.kept = self.outside = 0  # bytes there; of these, what stays; others', when it was chosen
        self.stream: torch.cuda.Stream | None = None
        self.done: torch.cuda.Event | None = None  # the last call, on whatever stream
        self.lock, self.caller = threading.Lock(), 0  # the thread that is in a call
        self.size, self.part = 0, ""  # of the call under way: of what it is given, and the path of what was called
        self.looks = False  # it only looks at weights

    def enter(self, here: torch.device = CPU) -> bool:
        """From the CPU to the GPU; where that cannot be, nothing is done, and False returned: as a whole it fits."""
        if self.arena is not None or self.replaced:
            return True
        if self.alone and unmovable(weights_in(self.model), self.device) is None:
            here = self.device  # to their places on the CPU at once
        elif self.alone:
            type(self.model).to(self.model, here)
        if not super().enter(here):
            check_whole(self.model, self.budget, self.reason, alone=self.alone)
            return False
        self._place()
        if self.caller:
            self._begin()
        return True

    def leave(self) -> nn.Module:
        """From the GPU to the CPU, whoever has moved it there."""
        if not self.replaced:
            self.bring_back()
            if brought_by_another(self.model):
                self.pieces = []  # another offload brings them to each call
            else:
                type(self.model).to(self.model, "cpu")  # what came to it on the GPU
        return self.model

    @property
    def replaced(self) -> bool:
        """Whether another one streams the model now, as for somebody who has optimized it beside its pipeline."""
        return streamed_model(self.model) not in (self, None)

    def let_go(self) -> None:
        """Its weights are on the CPU, and nothing of ours is on it."""
        unhook(self)
        self.leave()

    def _pack(self, tensors: list[torch.Tensor]) -> None:
        """Its weights lie side by side on the CPU, each block's by themselves; what could be pinned is.

        Pieces that nobody touched stay; what is new beside them, such as an adapter, is for the card.
        """
        present, apart = set(map(id, tensors)), self.reads.apart
        self.pieces, self.plans = still_placed(self.model, self.pieces, self.plans)
        kept = intact = [piece for piece in self.pieces if piece.intact(present) and self.reads.streams(piece)]
        if self.stacks and any(piece.path for piece in self.pieces if piece not in kept):
            kept = []  # whose tensors lie side by side
        if kept and {id(slot.tensor) for piece in kept for slot in piece.layout.slots} == present:
            return
        left = laid_anew(self.pieces, kept, tensors, apart) if intact else pieces(self.model, apart)
        ends = list(accumulate((layout.nbytes + PAGE for _, layout in left), initial=0))
        host, here = HostBuffer(ends[-1]), left[0][1].slots[0].tensor.device
        most = self.may_pin(*kept)
        pin = partial(host.pin, None if most is None else max(end for end in ends if end <= most))
        if here.type == "cuda":
            pin(empty=True)  # so that the GPU copies at full speed
        made = [PlacedWeights(path, layout, host, at) for (path, layout), at in zip(left, ends, strict=False)]
        if self.device.type == "cuda":
            pin()
        self.pieces = [*kept, *made]
        self.streamed, self.measured = None, {}
        blocks = [piece.path for piece in self.pieces if piece.path]
        self.stacks = stacks_in(self.model, self.pieces)
        self.order = list(dict.fromkeys([*(path for path in self.order if path in blocks), *blocks]))

    @property
    def sizes(self) -> WeightSizes:
        found = {piece.path: piece.nbytes for piece in self.pieces if piece.path}
        rest = sum(piece.nbytes for piece in self.pieces if not piece.path)
        experts = max((experts_in(forward.module)[0] for forward in self.stacks.values()), default=0)
        return WeightSizes(rest, tuple(found[path] for path in self.order), experts)

    def room(self) -> int:
        """Bytes for weights, beside what a call of the present size needs."""
        needs = max((one.nbytes for one in self.measured.values()), default=0)
        return room_for_weights(self.budget.card - self._allocated() - self.beside(), needs)

    @property
    def unknown(self) -> bool:
        """Whether no call of the same, and of this size, was seen yet."""
        return self.part not in self.measured or self.size > self.measured[self.part].size

    def _place(self) -> None:
        """Chooses blocks anew where that is due, and copies those that stay."""
        self.outside = self._allocated() + self.beside()
        if self.streamed is not None and not self.unknown and not self.due and self.on_card <= self.room():
            streamed, copies = self.streamed, self.copies  # its addresses, and the graphs that know them, stay
        elif self.unknown and 2 * self.sizes.total > self.budget.card - self.outside:
            check_fits(self.sizes, self.budget, type(self.model).__name__, self.beside())
            streamed, copies = tuple(range(len(self.order))), 0
        else:
            streamed = streamed_blocks(self.sizes, self.room())
            copies = self.sizes.copies(streamed, self.room())
        self.due = False
        if self.arena is None or (streamed, copies) != (self.streamed, self.copies):
            self.bring_back()
            if blocks_moved(self.model, self.pieces):
                self._pack(weights_in(self.model))
                return self._place()
            self._bring(streamed, copies)

    def _bring(self, streamed: tuple[int, ...], copies: int) -> None:
        before = self.addresses  # held until others are reserved: graphs of before must not find theirs again
        if (streamed, copies) != (self.streamed, self.copies):
            self.addresses = None
        self.streamed, self.copies, self.on_card = streamed, copies, self.sizes.on_card(streamed, copies)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        arena = self.arena = self._mapped(self.on_card + GRAIN)
        del before
        inside, at = {self.order[i] for i in streamed}, 0
        for piece in self.pieces:
            piece.placement = WeightPlacement.RING if piece.path in inside else WeightPlacement.CARD
            if piece.path not in inside:
                with as_ordinary():
                    arena[at : at + piece.nbytes].copy_(piece.bytes, non_blocking=True)
                piece.put(WeightPlacement.CARD, arena[at : at + piece.nbytes], apart=self.alone)
                piece.go(WeightPlacement.CARD, WeightPlacement.HOST)
                at += piece.nbytes
        self.kept = -(-at // GRAIN) * GRAIN
        self.sums = sums(arena[: self.kept])
        self._make_ring(streamed, arena[self.kept :])
        hook_blocks(self, self.order if streamed else (), called=not self.stacks)
        if arena.is_cuda:
            torch.cuda.current_stream(arena.device).synchronize()

    def _make_ring(self, streamed: tuple[int, ...], memory: torch.Tensor) -> None:
        self.ring, self.numbers = None, {}
        if not streamed:
            return
        own = {piece.path: piece for piece in self.pieces}
        blocks = [own[self.order[i]] for i in streamed]
        largest, count = max(piece.nbytes for piece in blocks), min(BUFFERS, len(blocks))
        buffers = [memory[i * largest : (i + 1) * largest] for i in range(count)]
        if memory.is_cuda and self.stream is None:
            self.stream = stream_of_its_own(self.device)
        pinned = {i for i, piece in enumerate(blocks) if piece.pinned}
        for number, piece in enumerate(blocks):
            piece.put(WeightPlacement.CARD, buffers[number % count][: piece.nbytes])
            self.numbers[piece.path] = number, piece
        self.ring = Ring(buffers, [piece.bytes for piece in blocks], pinned, self.stream)
        if self.stacks:
            memory, stacks = memory[count * largest :], [self.stacks[piece.path] for piece in blocks]
            rows = [list(self.stacks).index(piece.path) for piece in blocks]
            self.hot = HotExperts(self, rows, blocks, stacks, self.device, self.ring, memory, self.copies)

    def bring_back(self) -> None:
        """What stayed on the GPU is on the CPU again, with what was changed there; the memory is given back."""
        if self.arena is None:
            return
        if self.done is not None:
            self.done.synchronize()
        if self.hot is not None:
            self.hot.let_go()
            self.hot = None
        changed = not all(map(torch.equal, self.sums, sums(self.arena[: self.kept])))
        for piece in self.pieces:
            piece.bring_back(changed)
        self.arena = self.ring = None
        self._unmap()

    @contextmanager
    def one_call(self, part: str = "", size: int | None = 0) -> Iterator[None]:
        """Inside, calls of this thread are steps of one, of what has this path. size: of what it is given, or None, see
        `call_hooks.one_call`.
        """
        if self.caller == threading.get_ident():
            yield
            return
        try:
            self._begin_call(part, size)
            yield
        except torch.OutOfMemoryError as error:
            told = self.budget.too_little(type(self.model).__name__, self.on_card, "more than is left")
            raise torch.OutOfMemoryError(f"{told}. {error}") from error
        finally:
            self._end_call()

    def next_step(self) -> bool:
        """Between two steps; returns whether weights lie elsewhere now."""
        before = self.arena
        self._place()
        if self.arena is not before:
            self._begin()
        elif self.hot is not None:
            self.hot.begin_call(self.size, step=True)
        return self.arena is not before

    @property
    def still(self) -> bool:
        """Whether no weights move from one call to the next."""
        return self.arena is not None and all(one.placement is not WeightPlacement.RING for one in self.pieces)

    def _begin_call(self, part: str, size: int | None) -> None:
        self.lock.acquire()
        self.caller, self.part, self.size, self.looks = threading.get_ident(), part, size or 0, size is None
        unmerge_disabled(self.model, self.leave)  # a call would change the copy of a weight that came for it
        if self.arena is not None and not where_left(self.pieces, weights_in(self.model)):
            self.leave()  # somebody has moved or exchanged weights
        if self.arena is not None:
            if not self.looks:
                self._place()
            self._begin()
        elif self.alone and not brought_by_another(self.model):
            self.enter()

    def _begin(self) -> None:
        """The weights of blocks that stream are where their bytes will be."""
        for piece in self.pieces:
            if piece.placement is WeightPlacement.RING:
                piece.go(WeightPlacement.CARD, WeightPlacement.HOST)
        if self.done is not None:
            torch.cuda.current_stream(self.device).wait_event(self.done)
        if self.hot is not None and not self.looks:
            self.hot.begin_call(self.size)
        if self.unknown and not self.looks and (self.measuring is not None or MEASURING.acquire(blocking=False)):
            self.measuring, self.seen = (self.size, self._allocated(), calls_checked()), []
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # the allocator keeps more than what is asked for, and that counts
                torch.cuda.reset_peak_memory_stats(self.device)

    def _end_call(self) -> None:
        """Also of a call that has raised."""
        if self.caller != threading.get_ident():
            return
        try:
            self.end_run()
            if self.arena is not None and self.arena.is_cuda:
                self.done = self.done or torch.cuda.Event()
                self.done.record(torch.cuda.current_stream(self.device))
            for piece in self.pieces:
                if piece.placement is WeightPlacement.RING:
                    piece.go(WeightPlacement.HOST)
            if self.measuring is not None:
                self._learn(*self.measuring)
        finally:
            if self.measuring is not None:
                MEASURING.release()
            self.caller, self.measuring, self.seen = 0, None, None
            self.lock.release()

    def _learn(self, size: int, before: int, checked: int) -> None:
        """From a call of a new size: what it needed but for checks, and in which order it called the blocks."""
        needed, known = self._peak() - before, self.measured.get(self.part, Measured(0, 0))
        if checked == calls_checked():
            self.measured[self.part], self.due = Measured(size, max(known.nbytes, needed)), True
            if self.outside + self.sizes.least() + needed > self.budget.card:  # which has more, or it had failed
                told = type(self.model).__name__, self.sizes.least(), f"{needed / 1e9:.2f} GB"
                warnings.warn(self.budget.too_little(*told), stacklevel=2)
        turn = iter(called := dict.fromkeys(self.seen or ()))
        order = [next(turn) if path in called else path for path in self.order]
        if order != self.order:
            self.order, self.streamed = order, None

    def end_run(self) -> None:
        """Of its forward: of one of several in a call, while that is timed and captured."""
        if self.ring is not None:
            self.ring.end()

    def take_block(self, path: str) -> None:
        if self.seen is not None:
            self.seen.append(path)
        if self.ring is not None and self.streamed is not None:
            if not self.ring.begun:
                self.ring.begin(bisect_left(self.streamed, self.order.index(path)), ahead=path != self.part)
            if path in self.numbers:
                number, piece = self.numbers[path]
                piece.go(WeightPlacement.CARD)  # where somebody has moved a weight whose bytes were not there
                self.ring.take(number)

    def leave_block(self, path: str) -> None:
        if self.ring is not None and path in self.numbers and path != self.part:
            self.ring.leave(self.numbers[path][0])

    def rows(self) -> list[tuple[str, str, str]]:
        """(path, placement, note) for the report."""
        return [piece.row(self.device) for piece in sorted(self.pieces, key=lambda one: bool(one.path))]
