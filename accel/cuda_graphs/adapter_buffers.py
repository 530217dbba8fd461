"""Copies of a model's adapters at addresses that stay, in one form for all: a graph that reads them holds for any.

Products ask for what adapters add, by the linears they multiply for. What is asked for first gets a buffer, where all
adapters that are active lie side by side, with their scales in B. Before each call the buffers are filled, in a launch
or two. A snapshot shows what was switched since. A scale for one call, as in `cross_attention_kwargs`, is a factor of
all of them.
"""

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from accel_kernels import LowRank, copy_matrices
from accel_kernels.gemm.adapters.copy_matrices import MatrixCopies, matrix_copies
from accel_kernels.gemm.adapters.low_rank_addend import part_starts
from accel_kernels.gemm.adapters.low_rank_term import COPIES, WIDE, LowRankTerm
from accel_kernels.warmup import warming_up
from torch import nn

from accel.cuda_graphs.adapter_group import AdapterGroup, AdapterParts, Kind, adapters_of
from accel.cuda_graphs.fingerprint import Fingerprint
from accel.libraries.adapters import BASE, BASE_ROW, READ, low_rank_scales, own_parts, row_adapters
from accel.patching.owner import PartlyCopied
from accel.quantization.adapters import BUFFERS, TOKENS

TABLE, NAMES = 0, 64  # in place of a number of rows: for each name one, and of how many at least
SAME = 1e-6  # relative: peft multiplies a scale in a call, and divides it again


class AdapterBuffers(PartlyCopied):
    """Of one model.

    form: another number once buffers that graphs may read are gone. written: grows when other adapters are read.
    asked: linears for which products have asked, since somebody emptied it.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.groups: dict[tuple[int, ...], AdapterGroup] = {}
        self.copies: dict[Kind, MatrixCopies] = {}
        self.seen: Fingerprint | None = None
        self.hooks: list[tuple] = []
        self.first: Fingerprint | None = None  # the same of one linear alone
        self.form = self.written = 0
        self.whole = False  # whether they hold all adapters, since rows were seen to have adapters of their own
        self.kept: dict[tuple, torch.Tensor] = {}  # by a group's key and a number of rows, or `TABLE`
        self.numbers = {BASE_ROW: 1}  # by the name of an adapter, its row in tables; 0 is for those that are active
        self.factor = 1.0  # of all scales, in the call that runs
        self.direct = False  # whether adapters are read where they lie, since their scales cannot be followed
        self.fresh = False  # whether buffers were made in the call that runs, which knows no factor yet
        self.filled: tuple | None = None  # what was written last
        self.asked: set[int] = set()
        self.step: torch.Tensor | None = None  # counts calls, see `LowRankTerm`
        self.launched: set[tuple[int, ...]] = set()  # keys for which products have asked in this step
        self.lock = threading.RLock()
        self.done: torch.cuda.Event | None = None  # behind what reads the buffers

    def members(self) -> list[Any]:
        """The linears with adapters, of all groups."""
        found = dict.fromkeys(layer for group in self.groups.values() for layer in group.present)
        return [layer for layer in found if layer is not None and BASE in layer._modules]

    def apart(self) -> set[int]:
        """By number, all modules whose state the buffers follow, so that graphs do not depend on it."""
        return {id(part) for layer in self.members() for part in own_parts(layer)}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, products read adapters from the buffers; one thread and one stream at a time."""
        if self.direct:
            yield
            return
        alone = bool(self.groups)
        if alone:
            self.lock.acquire()
        token = BUFFERS.set(self)
        try:
            yield
        finally:
            BUFFERS.reset(token)
            if alone:
                self._mark()
                self.lock.release()

    def term(self, layers: Sequence[Any], x: torch.Tensor, gate: bool = False) -> LowRankTerm | None:
        """What the adapters of these linears add to their one product; None where there are none that fit."""
        key, dtype = tuple(map(id, layers)), x.dtype
        if not self.whole and (TOKENS.get() is not None or (not self.groups and any(map(_by_row, layers)))):
            self._hold_all()
        group = self.groups.get(key)
        if group is None or group.dtype != dtype or group.present != list(layers):
            group = self._made(layers, dtype)
            if group is None:
                return None
            with self.lock:
                self.form += key in self.groups  # of another dtype, or of layers that are gone
                self.kept = {place: one for place, one in self.kept.items() if place[0] != key}
                self.groups[key] = group
                self.seen, self.fresh = None, True
        elif not self._in_step(group):
            return None
        rows = None
        if self.whole and (rows := self._rows(key, group, x)) is None:
            return None
        self.asked.update(key)
        again = key in self.launched  # in one step, as of a block that a model runs twice
        self.launched.add(key)
        return group.term(gate, rows, None if again or self.step is None else self.step)

    def _rows(self, key: tuple[int, ...], group: AdapterGroup, x: torch.Tensor) -> torch.Tensor | None:
        """As of `LowRankTerm`; x: (rows, ..., K), or of as many tokens as have adapters of their own."""
        index = TOKENS.get()
        if x.dim() < 3 if index is None else x.shape[:-1].numel() != len(index):
            return None
        place = key, len(x) if index is None else TABLE
        if place not in self.kept and not _capturing():
            with torch.inference_mode(False):
                if (found := self._content(group, place[1], {})) is not None:
                    self.kept[place] = found
        kept = self.kept.get(place)
        return kept if index is None or kept is None else kept.index_select(0, index)

    def _content(self, group: AdapterGroup, rows: int, masks: dict[tuple, torch.Tensor]) -> torch.Tensor | None:
        names = [None, *self.numbers] if rows == TABLE else None
        return group.kept(max(NAMES, 1 << len(self.numbers).bit_length()) if names else rows, masks, names)

    def number(self, name: str) -> int:
        """Of an adapter, see `TOKENS`."""
        if name not in self.numbers:
            self.numbers[name], self.seen = len(self.numbers) + 1, None
        return self.numbers[name]

    def _hold_all(self) -> None:
        self.form += bool(self.groups)
        self.whole, self.groups, self.seen = True, {}, None

    def _made(self, layers: Sequence[Any], dtype: torch.dtype) -> AdapterGroup | None:
        if not any(BASE in layer._modules for layer in layers):
            return None
        known, most = self._known(layers, dtype)
        rank = next((rank for rank in WIDE if rank >= most), None)
        if len(known) < len(layers) or not most or rank is None:
            return None
        if _capturing():
            raise RuntimeError("adapters that were not seen before the capture")
        device, sizes = next(one.down.device for own in known for one in own), [one.out_features for one in layers]
        ends = tuple(sum(sizes[: i + 1]) for i in range(len(sizes)))
        with torch.inference_mode(False), torch.no_grad():
            down = torch.zeros(len(sizes) * rank, layers[0].in_features, device=device, dtype=dtype)
            up = torch.zeros(ends[-1], rank, device=device, dtype=dtype)
            starts = part_starts(ends, device)
            tagged = torch.zeros(COPIES, len(down), device=device, dtype=torch.int64)
            if self.step is None or self.step.device != device:
                self.step = torch.ones(1, device=device, dtype=torch.int32)
            scales = [one.scale for own in known for one in own]
            group = AdapterGroup([ref(one) for one in layers], dtype, ends, down, up, starts, tagged, [], scales, [])
            group.names = self._names(layers)
            for is_up, source, target, scale in group.pairs(known):
                target.copy_(source.float() * scale if is_up else source)
        return group

    def _known(self, layers: Sequence[Any], dtype: torch.dtype) -> tuple[list[tuple[LowRank, ...]], int]:
        """Adapters of each layer, without layers of which buffers can hold none; the largest sum of one's ranks."""
        found = (adapters_of(layer, dtype, self.whole) for layer in layers)
        known = [own for own in found if own is not None]
        return known, max((sum(one.down.shape[0] for one in own) for own in known), default=0)

    def _names(self, layers: Sequence[Any]) -> list[list[str]]:
        scales = (low_rank_scales(one, self.whole) if BASE in one._modules else None for one in layers)
        return [list(one or ()) for one in scales]

    def _in_step(self, group: AdapterGroup) -> bool:
        """Whether the buffers hold the scales of this moment; in a call with a scale of its own, after a factor."""
        now = group.scales_now(self.whole)
        factor = next((n / s for n, s in zip(now, group.scales, strict=False) if s), self.factor)
        if len(now) == len(group.scales) and _alike(now, group.scales, self.factor):
            return True
        if len(now) == len(group.scales) and _alike(now, group.scales, factor) and not _capturing():
            self.fill(factor)
            return True
        self.direct = True  # from the next call on
        self.form += 1
        if _capturing():
            raise RuntimeError("adapters were switched in the call")
        return False

    def seem(self) -> bool:
        """Whether one of them is as it was read, in no time: who switches adapters does it everywhere."""
        return not self.groups or (self.first is not None and self.first.holds())

    def holds(self) -> bool:
        """Whether the adapters are those that were read last."""
        return not self.groups or (
            self.seen is not None and self.seen.reachable() and self._hooks() == self.hooks and self.seen.holds()
        )

    def _hooks(self) -> list[tuple]:
        """What is called before each layer, by which rows get their adapters."""
        return [tuple(layer._forward_pre_hooks.values()) for layer in self.members()]

    def read(self) -> bool:
        """Looks at all adapters anew. False where a buffer had to go, and graphs with it."""
        self.filled, self.written = None, self.written + 1
        masks: dict[tuple, torch.Tensor] = {}
        members, hooks = self.members(), self._hooks()
        alike = self.seen is not None and self.seen.reachable() and self.seen.renewed()
        if alike and (hooks == self.hooks or (self.whole and all(map(_hooked_by_row, members)))) and self._scaled():
            self.first = _look(members[:1])
            if hooks != self.hooks:
                self.hooks = hooks
                with torch.inference_mode(False), torch.no_grad():
                    self._wait()
                    self._renew_rows(masks)
            return True
        if not self.whole and any(map(_by_row, members)):
            self._hold_all()
            return False
        kept: dict[tuple[int, ...], AdapterGroup] = {}
        rows: dict[Kind, list[tuple]] = {}
        for key, group in self.groups.items():
            known, most = self._known(group.present, group.dtype)
            if len(known) < len(group.layers) or most > group.up.shape[1]:
                continue
            kept[key] = group
            group.names = self._names(group.present)
            group.scales, group.kinds = [one.scale for own in known for one in own], []
            for is_up, source, target, scale in group.pairs(known):
                kind = is_up, source.dtype, target.dtype
                rows.setdefault(kind, []).append((source, target, scale))
                group.kinds += [kind] if is_up else []
        gone = len(kept) < len(self.groups)
        self.groups, self.form = kept, self.form + gone
        members = self.members()
        self.seen, self.first, self.hooks = _look(members), _look(members[:1]), self._hooks()
        with torch.inference_mode(False), torch.no_grad():
            if whole := [tensor for group in kept.values() for tensor in (group.down, group.up)]:
                self._wait()
                torch._foreach_zero_(whole)
            self._renew_rows(masks)
            self.copies = {kind: matrix_copies(*zip(*found, strict=True)) for kind, found in rows.items()}
        return not gone

    def _renew_rows(self, masks: dict[tuple, torch.Tensor]) -> None:
        """Writes which rows have which adapters now, where graphs read it. masks: as of `AdapterGroup.kept`."""
        kept: dict[tuple, torch.Tensor] = {}
        for (key, rows), before in self.kept.items():
            found = self._content(self.groups[key], rows, masks) if key in self.groups else None
            if found is not None and found.shape == before.shape:
                kept[key, rows] = before.copy_(found)
            else:  # its linears are gone, or there are more names than rows
                self.form += key in self.groups
        self.kept = kept

    def _scaled(self) -> bool:
        """Takes over scales of the same adapters; False where these are others."""
        factors: dict[Kind, list[float]] = {}
        for group in self.groups.values():
            scales = group.scales_now(self.whole)
            if len(scales) != len(group.scales):
                return False
            group.scales = scales
            for kind, scale in zip(group.kinds, scales, strict=True):
                factors.setdefault(kind, []).append(scale)
        for kind, found in factors.items():
            self.copies[kind] = self.copies[kind].scaled(found)
        return True

    def keep(self, modules: Iterable[nn.Module]) -> None:
        """Gives up buffers of layers that are not among these."""
        there = set(map(id, modules)) if self.groups else set()
        kept = {key: group for key, group in self.groups.items() if there.issuperset(map(id, group.present))}
        if len(kept) < len(self.groups):
            self.groups, self.copies, self.kept = kept, {}, {}  # which hold what the user has removed
            self.seen = self.first = None
            self.form, self.whole = self.form + 1, self.whole and bool(kept)

    def fill(self, factor: float = 1.0, trusting: bool = False) -> None:
        """Writes what adapters hold now into the buffers.

        factor: of all scales. trusting: not where nothing was changed in place since, as autograd counts.
        """
        if not self.groups or warming_up():
            return
        if self.seen is None:
            self.read()
        now, self.factor = (self.versions(), factor), factor
        if trusting and now[0] is not None and self.filled == now:
            return
        self._wait()
        with torch.no_grad():
            for (is_up, *_), copies in self.copies.items():
                copy_matrices(copies, factor if is_up else 1.0)
        self.filled = now

    def advance(self) -> None:
        """Begins a step; within a capture, of each replay."""
        self.launched.clear()
        if self.step is not None and self.groups:
            self.step += 1

    def versions(self) -> int | None:
        """As of `Fingerprint`, of the adapters."""
        return 0 if self.seen is None else self.seen.versions()

    def follow(self) -> None:
        """Reads adapters that were switched, and fills the buffers, for a call of no factor."""
        if not self.holds():
            self.read()
        self.fill()
        self.advance()
        self.fresh = False

    def complete(self) -> bool:
        """Whether products have asked for all adapters since `asked` was emptied."""
        return all(id(layer) in self.asked for layer in self.members())

    def _wait(self) -> None:
        if self.done is not None and self.step is not None:
            torch.cuda.current_stream(self.step.device).wait_event(self.done)

    def _mark(self) -> None:
        if self.step is not None and self.step.is_cuda:
            self.done = torch.cuda.current_stream(self.step.device).record_event(self.done)


def _look(layers: Sequence[nn.Module]) -> Fingerprint:
    return Fingerprint(AdapterParts(layers), brief=READ)


def _hooked_by_row(layer: Any) -> bool:
    """Whether nothing else is called before it than what gives rows their adapters."""
    return not layer._forward_pre_hooks or row_adapters(layer) is not None


def _by_row(layer: Any) -> bool:
    return BASE in layer._modules and row_adapters(layer) is not None


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _alike(now: list[float], before: list[float], factor: float) -> bool:
    return all(math.isclose(one, other * factor, rel_tol=SAME) for one, other in zip(now, before, strict=True))
