"""Memory that all CUDA graphs of one optimized object share, and the order in which they run."""

import itertools
import threading
from collections import defaultdict
from collections.abc import Collection
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from accel_kernels.device import card
from torch import nn

from accel.cuda_graphs.entry import CapturedGraph, Entry
from accel.cuda_graphs.fingerprint import States
from accel.parallel.group_end import clear_at_end
from accel.parallel.ranks import Ranks

OUTPUTS = 1 / 4  # of the memory limit, that the outputs of one runner's graphs may take together


class Runner(Protocol):
    """Whoever keeps graphs of this pool, by shape."""

    module: nn.Module
    entries: dict[tuple, Entry]
    states: States
    ranks: Ranks | None

    def rows(self) -> list[dict]: ...


class GraphPool:
    """Memory shared by all graphs of one optimized object, and the order in which they may run.

    Graphs of one pool reuse each other's memory, so replays must not overlap: a lock orders the host, an event the
    streams. Over the memory limit all graphs are dropped, and captured again when needed. Memory of a graph that is
    dropped alone is used by later ones, and counts until all are dropped.
    """

    def __init__(self, limit_gb: float | None):
        self.limit_gb = limit_gb
        self.lock = threading.RLock()
        self.numbers = itertools.count()
        self._runners: WeakValueDictionary[int, Runner] = WeakValueDictionary()  # each of them holds the pool
        self.handles: dict[torch.device, object] = {}
        self.done: dict[torch.device, torch.cuda.Event] = {}
        self.sides: dict[torch.device, torch.cuda.Stream] = {}
        self.left_mb: defaultdict[torch.device, float] = defaultdict(float)  # by graphs that were dropped alone

    def __getstate__(self) -> dict[str, Any]:
        return {"limit_gb": self.limit_gb}

    def __setstate__(self, state: dict[str, Any]) -> None:
        GraphPool.__init__(self, **state)

    @property
    def runners(self) -> list[Runner]:
        """In the order they came."""
        return list(self._runners.values())

    def add(self, runner: Runner) -> None:
        self._runners[next(self.numbers)] = runner

    def handle(self, device: torch.device, failed: bool = False) -> object:
        """Of the memory of the next graph. failed: a capture to the last one has, which torch 2.11 then never ends."""
        with torch.cuda.device(device):
            # A pool whose last graph is gone must not be used again: torch's allocator may still be freeing it.
            if not self._occupied(device):
                self.handles.pop(device, None)
                self.left_mb.pop(device, None)
            if failed or device not in self.handles:  # others in the last one keep what was left there
                self.handles[device] = torch.cuda.graph_pool_handle()
            if device not in self.done:
                self.done[device] = torch.cuda.Event()
        if any(runner.ranks is not None for runner in self.runners):
            clear_at_end(self)
        return self.handles[device]

    def side(self, device: torch.device) -> torch.cuda.Stream:
        """A stream for replays that the caller's stream is not to wait for."""
        if device not in self.sides:
            self.sides[device] = torch.cuda.Stream(device)
        return self.sides[device]

    def _occupied(self, device: torch.device) -> bool:
        entries = (entry for runner in self.runners for entry in runner.entries.values())
        return any(entry.graph is not None and entry.graph.device == device for entry in entries)

    def limit_mb(self, device: torch.device) -> float:
        if self.limit_gb is not None:
            return self.limit_gb * 1024
        return card(device).memory / 2**20 / 4

    def used_mb(self, device: torch.device) -> float:
        """All that graphs on a device keep: intermediate memory, inputs, outputs, and the driver's of their nodes."""
        entries = (entry for runner in self.runners for entry in runner.entries.values())
        held = (entry.memory_mb for entry in entries if entry.graph is not None and entry.graph.device == device)
        return sum(held) + (self.left_mb[device] if self._occupied(device) else 0)

    def rows(self) -> list[dict]:
        """One row a device with graphs, for the report."""
        with self.lock:
            return [
                {
                    "device": str(device),
                    "used_mb": round(self.used_mb(device), 1),
                    "limit_mb": round(self.limit_mb(device), 1),
                }
                for device in self.done
            ]

    def drop(self, entry: Entry) -> None:
        """Drops one graph."""
        if entry.graph is not None:
            if entry.graph.device in self.done:
                self.done[entry.graph.device].synchronize()  # a replay on another stream may still be at it
            self.left_mb[entry.graph.device] += entry.memory_mb
            entry.graph = None

    def bound_outputs(self, entries: Collection[Entry], newest: Entry, device: torch.device) -> None:
        """Drops a runner's least recently used graphs, but for the newest, while their outputs take too much."""
        kept = {id(entry): entry.graph.outputs_mb for entry in entries if entry.graph and entry.graph.device == device}
        for entry in sorted((entry for entry in entries if id(entry) in kept), key=lambda entry: entry.last_replay):
            if sum(kept.values()) <= OUTPUTS * self.limit_mb(device):
                return
            if entry is not newest:
                self.drop(entry)
                del kept[id(entry)]

    def forget(self) -> None:
        """Drops every graph and all fingerprints, which refer to patches, and through them to runners."""
        self.clear()
        with self.lock:
            for runner in self.runners:
                runner.states.clear()

    def clear(self, alone: bool = False) -> None:
        """Drops every graph and frees the memory. alone: except those that ranks must drop together."""
        with self.lock:
            for runner in self.runners:
                if not alone or runner.ranks is None:
                    for entry in runner.entries.values():
                        entry.graph = None
            for done in self.done.values():
                done.synchronize()
            for device in [device for device in self.done if not self._occupied(device)]:
                del self.done[device]
                self.handles.pop(device, None)
                self.left_mb.pop(device, None)
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()


DRIVERS = 64  # MiB of one graph's nodes at most: more was taken by another process meanwhile


class CaptureMemory:
    """Measures from when it is created, after cached memory was given back."""

    def __init__(self, device: torch.device):
        self.device = device
        self.reserved, self.free = self._now()

    def _now(self) -> tuple[int, int]:
        return torch.cuda.memory_reserved(self.device), torch.cuda.mem_get_info(self.device)[0]

    def taken_mb(self, graph: CapturedGraph) -> float:
        """The pool's growth, the driver's memory for nodes, and what the graph reads outside of both."""
        reserved, free = self._now()
        grown = (reserved - self.reserved) / 2**20
        nodes = (self.free - free) / 2**20 - grown
        return grown + min(max(nodes, 0.0), DRIVERS) + graph.beside_mb
