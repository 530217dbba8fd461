"""Choices made by measuring on this card, once a shape, and remembered on disk for the next process."""

import json
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from accel_kernels.capture import capture


class Choices:
    """Names by key. cache: a JSON file, or None. Copies and pickles keep the file and none of the choices."""

    def __init__(self, cache: Path | None = None):
        self.cache = cache
        self.choices: dict[str, str] = {}
        self._stored: dict[str, str] | None = None  # of earlier processes, not yet known to hold in this one
        self._lock = threading.Lock()

    def decide(self, key: str, holds: Callable[[str], bool], measure: Callable[[], str]) -> str:
        """The choice for this key: made before, or found on disk and still possible, or measured now."""
        with self._lock:
            if key not in self.choices:
                stored = self._read().get(key)
                if isinstance(stored, str) and holds(stored):
                    self.choices[key] = stored
                else:  # new, or a library that was there then is gone
                    self.choices[key] = measure()
                    self._save()
            return self.choices[key]

    def _read(self) -> dict[str, str]:
        if self._stored is None:
            try:
                stored = json.loads(self.cache.read_text()) if self.cache is not None else {}
            except (OSError, ValueError):
                stored = {}  # no cache yet, or a damaged one: it is measured and written again
            self._stored = stored if isinstance(stored, dict) else {}
        return self._stored

    def _save(self) -> None:
        if self.cache is None:
            return
        try:
            self.cache.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.cache.parent, delete=False) as file:
                json.dump(self._read() | self.choices, file, indent=1)
            os.replace(file.name, self.cache)
        except OSError:
            self.cache = None  # a read-only home only costs measuring again next time


def milliseconds(run: Callable[[], object], repeats: int = 8) -> float:
    """Least time of a few runs inside a CUDA graph: launching costs the host more than a small kernel takes."""
    run()
    torch.cuda.current_stream().synchronize()  # not the device: that fails while another thread captures
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        for _ in range(repeats):
            run()
    times = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / repeats)
    return min(times)
