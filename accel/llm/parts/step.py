"""What the layers of one forward share: where its keys and values go. One a thread: threads may run side by side."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accel_kernels import KV, RowStates

from accel.fusion.loop import PerThread


class Step:
    """One fast forward. kvs: every layer's store, by its place in the cache. written: how many tokens went into each.
    around: what the layer is called with whose own code runs around its attentions. behind: what a layer gives behind
    its output, None for nothing. `angles`: rotations made once for all.
    """

    __slots__ = ("_angles", "around", "behind", "kvs", "written")

    def __init__(self, kvs: Mapping[int, KV | RowStates]):
        self.kvs = kvs
        self.written: dict[int, int] = {}
        self.around: dict[str, Any] | None = None
        self.behind: tuple | None = None
        self._angles: dict[tuple, tuple] = {}

    def runs_stock(self, layer: Any, args: tuple, kwargs: dict) -> bool:
        """Whether a layer that is called with these arguments runs stock."""
        return False

    def of_layer(self, layer: Any, x: torch.Tensor, kwargs: dict) -> torch.Tensor:
        """What a layer gives that is called with these."""
        return layer.computed(self, x, kwargs)

    def mask(self, spec: Any, kwargs: dict) -> torch.Tensor | None:
        """The keys that a layer called with these sees, for `paged_attention`; None for those that a text shows."""
        return None

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """What the own code of a layer gives to an attention, (rows, new, C), as the step has its tokens."""
        return x

    def to_rows(self, y: torch.Tensor) -> torch.Tensor:
        """The other way round."""
        return y

    def states(self, place: int) -> RowStates:
        """What a layer of linear attention keeps."""
        found = self.kvs[place]
        assert isinstance(found, RowStates)
        return found

    def angles(self, source: object, form: object, make: Callable) -> tuple[torch.Tensor, torch.Tensor]:
        """make(), or what it gave for the same source (an object alive until the forward ends) and form."""
        found = self._angles.get((id(source), form))
        if found is None:
            found = self._angles[id(source), form] = (source, tuple(make()))
        return found[1]


class ForwardContext(PerThread):
    """The step that this thread is in, None outside of one."""

    @property
    def current(self) -> Step | None:
        return getattr(self._local, "step", None)

    @contextmanager
    def taken(self, step: Step) -> Iterator[None]:
        before, self._local.step = self.current, step
        try:
            yield
        finally:
            self._local.step = before
