"""Choices made by measuring on this card, once a shape, and remembered on disk for the next process."""

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from accel_kernels.caches.cache_file import CacheFile
from accel_kernels.errors import set_aside
from accel_kernels.trials import put_off

ROUNDS, MOST_REPEATS = 3, 3
ROUND = 2e-3  # seconds of one round of a race, about
LEAST_GAIN = 0.03  # of the time of what runs otherwise; closer ones are noise
CYCLES = 2e9  # a second, of the fastest clock
LARGEST = 2**63 - 1  # size of a tensor


class Place(NamedTuple):
    """Where a shape lies among others: only those of its kind compare, and the nearer by their sizes the better."""

    kind: tuple
    sizes: tuple[int, ...]

    def distance(self, other: "Place") -> float:
        """The largest factor between two sizes of the same name."""
        return max(max(a, b) / min(a, b) for a, b in zip(self.sizes, other.sizes, strict=True))


class Choices(ABC):
    """Names by key. cache: a JSON file, or None. Copies and pickles keep the file and none of the choices.

    A shape is measured when it is first asked for, or later where `Trials` collect what there is to measure, unless
    torch is told to be deterministic.
    """

    def __init__(self, cache: Path | None = None):
        self.cache = cache
        self.choices: dict[str, str] = {}
        self.measured: dict[str, str] = {}  # of the choices, those that were not taken over from a neighbor
        self._stored: dict[str, str] | None = None  # of earlier processes, not yet known to hold in this one
        self._lessons: dict[tuple, dict[Place, str]] = {}
        self._lock = threading.RLock()

    def __getstate__(self):
        return {"cache": self.cache}

    def __setstate__(self, state):
        type(self).__init__(self, **state)

    @abstractmethod
    def place(self, key: str) -> Place:
        """What `key` stands for. Raises ValueError for a key of another form."""

    def decide(self, key: str, trial: Callable[[], Iterator[str | None]], otherwise: str) -> str:
        """The choice for this key, or `otherwise` as long as there is none.

        trial(): yields None after each step of measuring, and the choice at last; or learns or adopts it itself.
        """
        if (choice := self.choices.get(key)) is not None:
            return choice
        # Where equal calls must give equal bits, none runs by another choice than those after it.
        alike = torch.are_deterministic_algorithms_enabled()
        if not alike and put_off((self, key), lambda: self._settle(key, trial, otherwise)):
            return otherwise
        for _ in self._settle(key, trial, otherwise):
            pass
        return self.choices[key]

    def _settle(self, key: str, trial: Callable, otherwise: str) -> Iterator[None]:
        """Runs the trial and learns its choice; adopts `otherwise` where it fails."""
        choice = self.choices.get(key)
        if choice is not None:  # by another that asked for the same
            return
        try:
            for choice in trial():
                if choice is None:
                    yield
        except Exception as error:  # no memory for it, or a library that fails in a way of its own
            set_aside(error)
            choice = None
        if choice is not None:
            self.learn(key, choice)
            self._save()
        elif key not in self.choices:
            self.adopt(key, otherwise)

    def adopt(self, key: str, choice: str) -> None:
        """Takes a choice over without measuring: it teaches nothing and is not kept on disk."""
        self.choices[key] = choice

    def learn(self, key: str, choice: str) -> None:
        """The choice that was measured."""
        with self._lock:
            self.choices[key] = self.measured[key] = choice
            self._teach(key, choice)

    def _teach(self, key: str, choice: str) -> None:
        place = self.place(key)
        if not all(1 <= size <= LARGEST for size in place.sizes):
            raise ValueError(f"{key!r} has a size that no tensor has")
        self._lessons.setdefault(place.kind, {})[place] = choice

    def neighbor(self, key: str, reach: float) -> str | None:
        """What was measured for the nearest shape of the same kind, whose sizes are within a factor of `reach`."""
        place = self.place(key)
        with self._lock:
            self._read()
            known = self._lessons.get(place.kind, {})
            near = min(known, key=place.distance, default=None)
            return None if near is None or near.distance(place) > reach else known[near]

    def stored(self, key: str) -> str | None:
        """What an earlier process found."""
        with self._lock:
            return self._read().get(key)

    def _read(self) -> dict[str, str]:
        if self._stored is None:
            self._stored = {} if self.cache is None else CacheFile(self.cache, str).read()
            for key, choice in self._stored.items():
                try:
                    self._teach(key, choice)
                except ValueError:  # the form of another version, or damaged
                    continue
        return self._stored

    def _save(self) -> None:
        """All that was measured, as an earlier time may have found the disk full."""
        if self.cache is not None:
            with self._lock:
                measured = dict(self.measured)
            CacheFile(self.cache, str).add(measured)


def race(runs: Sequence[Callable[[], object]]) -> list[float]:
    """Milliseconds that each takes the GPU: the least of a few rounds in which they take turns.

    The GPU waits until a round is launched, since launching takes the host longer than a small kernel runs.
    """
    stream = torch.cuda.current_stream()
    for run in runs:
        run()
    stream.synchronize()  # not the device: that fails while another thread captures
    start = time.perf_counter()
    for run in runs:
        run()
    launching = time.perf_counter() - start
    stream.synchronize()
    repeats = max(1, min(MOST_REPEATS, int(ROUND / (time.perf_counter() - start))))
    least = [float("inf")] * len(runs)
    for _ in range(ROUNDS):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]
        torch.cuda._sleep(int(CYCLES * min(0.5, 1.5 * repeats * launching)))  # Windows ends a kernel after two seconds
        marks[0].record()
        for run, mark in zip(runs, marks[1:], strict=True):
            for _ in range(repeats):
                run()
            mark.record()
        marks[-1].synchronize()
        times = [a.elapsed_time(b) / repeats for a, b in pairwise(marks)]
        least = list(map(min, least, times))
    return least


def contest(
    names: Sequence[str],
    agrees: Callable[[str], bool],
    runs: Callable[[Sequence[str]], Sequence[Callable[[], object]]],
    device: torch.device,
    otherwise: str | None = None,
) -> Iterator[str | None]:
    """A trial of `Choices.decide`: each step runs one of the names for the first time, the last one lets them race.

    agrees: whether a name computes what it should; those that do not drop out. runs: calls to race, for these names,
    made for that step alone, so that none leaves tensors behind. otherwise: a name that is not tried, and that another
    must beat by LEAST_GAIN; or None.
    """
    found = [] if otherwise is None else [otherwise]
    for name in names:
        yield None
        with torch.cuda.device(device):
            if agrees(name):
                found.append(name)
    if len(found) > 1:
        yield None
        with torch.cuda.device(device):
            times = race(runs(found))
        best = min(times)
        if otherwise is None or best < (1 - LEAST_GAIN) * times[0]:
            found = [found[times.index(best)]]
    yield from found[:1]


class TensorForm(NamedTuple):
    """The properties of a tensor on which a kernel's speed depends. memory, offset: its storage and its place in it.

    storage: of a weight, which nothing writes to, a reference that does not keep it.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    memory: int = 0
    offset: int = 0
    storage: Callable[[], torch.UntypedStorage | None] = lambda: None

    @classmethod
    def of(cls, tensor: torch.Tensor, lent: bool = False) -> "TensorForm":
        """lent: whether the tensor itself may be given back by `filled`, for as long as its memory is there."""
        storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
        found = cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, storage.data_ptr(), offset)
        return found._replace(storage=weakref.ref(storage)) if lent else found

    @property
    def span(self) -> int:
        """Elements from its first to its last in memory."""
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    def filled(self) -> torch.Tensor:
        """The tensor that was lent, or one of random numbers, which are not taken from those that the user draws."""
        storage, whole = self.storage(), (self.offset + self.span) * self.dtype.itemsize
        if storage is None or storage.data_ptr() != self.memory or storage.nbytes() < whole:
            return self._within(self._random(self.span), 0)
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)

    def _random(self, size: int) -> torch.Tensor:
        generator = torch.Generator(self.device)
        generator.seed()
        return torch.empty(size, device=self.device, dtype=self.dtype).normal_(generator=generator)

    def _within(self, flat: torch.Tensor, offset: int) -> torch.Tensor:
        return flat.as_strided(self.shape, self.stride, offset)


def filled(forms: Sequence[TensorForm]) -> list[torch.Tensor]:
    """Tensors of random numbers, in as little memory as those of these forms took.

    Those that lay between each other in one memory, as columns of one product do, lie so again.
    """
    found: dict[int, torch.Tensor] = {}
    for form in forms:
        near = [place for place, one in enumerate(forms) if one.memory == form.memory and one.dtype == form.dtype]
        start = min(forms[place].offset for place in near)
        size = max(forms[place].offset + forms[place].span for place in near) - start
        if found.keys().isdisjoint(near) and size <= sum(forms[place].span for place in near):
            flat = form._random(size)
            found |= {place: forms[place]._within(flat, forms[place].offset - start) for place in near}
    return [found[place] if place in found else form.filled() for place, form in enumerate(forms)]
