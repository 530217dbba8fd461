"""Layers that follow each other on one device, and the forwards that pass through them.

The model's own code calls layer after layer. In a prompt each computes when it is called. In a step of decoding the
layers of a stretch only note what they were called with, and hand their input on; the last of them computes all, by
one CUDA graph. That holds where the code hands every layer what the one before gave. Every step looks whether it does:
else `Unchained` is raised, and each layer computes by itself.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from accel_kernels import KV, RowStates
from torch import nn

from accel.cuda_graphs.rule import obstacle
from accel.cuda_graphs.runner import GraphRunner
from accel.llm.generation.layer_forward import LayerForward
from accel.llm.parts.step import Step
from accel.llm.pipeline.device_hooks import moved_to
from accel.patching.structure import foreign_hooks


class Unchained(Exception):
    """A layer was handed something else than what the one before gave."""


class Stale(Exception):
    """A step that was to be replayed without a look at the model has no graphs for it as it is now."""


class Stretch:
    """Some layers of a model, one after another on one device.

    read: names of the keywords that its layers read, known from runs in which each computed by itself; None before.
    """

    def __init__(self, layers: list["StretchLayer"], device: torch.device):
        self.layers, self.device = layers, device
        self.read: frozenset[str] | None = None
        for layer in layers:
            layer.stretch = self

    @property
    def path(self) -> str:
        """For the report."""
        return f"{self.layers[0].path} to {self.layers[-1].path.rpartition('.')[2]} on {self.device}"

    def context(self) -> AbstractContextManager:
        """Inside, its device is the current one: kernels are launched there."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def run(
        self, kvs: Mapping[int, KV | RowStates], x: torch.Tensor, values: Sequence[Any], places: Sequence[dict]
    ) -> torch.Tensor:
        """x: (rows, new, C), on its device. values: what layers read; places: of each layer, which under what name."""
        step = Step(kvs)
        for layer, named in zip(self.layers, places, strict=True):
            x = layer.bound(layer.kernels, step, x.contiguous(), {name: values[n] for name, n in named.items()})
        return x


class StretchLayer(LayerForward):
    """A layer that stands in place of accelerate's hook, and leaves it to the step when it computes."""

    stretch: Stretch

    def fast(self, step: Step, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(step, StretchStep)
        x = args[0] if args else kwargs["hidden_states"]
        y = step.passes(self, x, kwargs)
        return y if self.spec.returns is None else (y, *(None,) * (self.spec.returns - 1))


class StretchStep(Step):
    """One forward, whose layers compute when they are called, on their own device. kvs: each on that of its layer."""

    __slots__ = ("_brought",)

    def __init__(self, kvs: Mapping[int, KV | RowStates]):
        super().__init__(kvs)
        self._brought: dict[tuple, tuple] = {}

    def bring(self, value: Any, device: torch.device) -> Any:
        """The value on a device: once a forward, for however many layers."""
        found = self._brought.get((id(value), device))
        if found is None:
            found = self._brought[id(value), device] = (value, moved_to(value, device))
        return found[1]

    def passes(self, layer: StretchLayer, x: torch.Tensor, kwargs: dict) -> torch.Tensor:
        stretch = layer.stretch
        with stretch.context():
            given = ReadKeywords(kwargs, lambda value: self.bring(value, stretch.device))
            y = layer.bound(layer.kernels, self, moved_to(x, stretch.device).contiguous(), given)
        stretch.read = given.read | (stretch.read or frozenset())
        return y


class ReadKeywords(dict):
    """Keywords of a call; brought to the device of whoever reads them, when they are. read: which were."""

    def __init__(self, kwargs: dict, bring: Callable):
        super().__init__(kwargs)
        self.bring, self.read = bring, frozenset[str]()

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self.read |= {name}
        return self.bring(value)

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


class Stores(Protocol):
    """Where the layers of a stretch keep what they keep in one forward."""

    def metadata(self, stretch: Stretch) -> tuple[torch.Tensor, ...]:
        """What kernels on its device read: first that of KV; and what else changes from call to call."""

    def kvs(self, stretch: Stretch, x: torch.Tensor, metadata: tuple[torch.Tensor, ...]) -> dict[int, Any]:
        """By a layer's place in the cache, for hidden states x, (rows, new, C). metadata: read in place of its own."""

    def turn(self, stretch: Stretch) -> AbstractContextManager:
        """Inside, the stretch computes; other forwards over the same stores have done so on its device, or wait."""


class ChainedStep(StretchStep):
    """One step of decoding, in which the last layer of a stretch computes for all of them.

    graphs: None for none. variant: what else decides which kernels run. seen: see `StretchGraphs.replay`.
    """

    __slots__ = ("calls", "graphs", "seen", "stores", "variant", "x")

    def __init__(self, stores: Stores, graphs: "StretchGraphs | None", variant: tuple, seen: object):
        super().__init__({})
        self.stores, self.graphs, self.variant, self.seen = stores, graphs, variant, seen
        self.calls: list[dict] = []
        self.x: torch.Tensor | None = None

    def passes(self, layer: StretchLayer, x: torch.Tensor, kwargs: dict) -> torch.Tensor:
        stretch, layers, number = layer.stretch, layer.stretch.layers, len(self.calls)
        if number == len(layers) or layers[number] is not layer or (number and x is not self.x):
            raise Unchained
        self.calls.append(kwargs)
        if number + 1 < len(layers):
            self.x = x
            return x
        calls, self.calls, self.x = self.calls, [], None
        with stretch.context():
            return self.through(stretch, x, calls)

    def through(self, stretch: Stretch, x: torch.Tensor, calls: list[dict]) -> torch.Tensor:
        """All of its layers. calls: the keywords of each."""
        read = sorted(stretch.read or ())
        known: dict[int, int] = {}
        values: list[Any] = []
        places: list[dict[str, int]] = []
        for kwargs in calls:
            named = {}
            for name in read:
                if name in kwargs:
                    value = kwargs[name]
                    if id(value) not in known:
                        known[id(value)] = len(values)
                        values.append(self.bring(value, stretch.device))
                    named[name] = known[id(value)]
            places.append(named)
        x, metadata = moved_to(x, stretch.device).contiguous(), self.stores.metadata(stretch)

        def run(x: torch.Tensor, values: Sequence[Any], metadata: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return stretch.run(self.stores.kvs(stretch, x, metadata), x, values, places)

        with self.stores.turn(stretch):
            if self.graphs is None:
                return run(x, values, metadata)
            return self.graphs.replay(stretch, run, (x, values, metadata), self.variant, places, self.seen)


class StretchGraphs:
    """CUDA graphs of every stretch; stands where the forward of a model on one device has its `GraphRunner`."""

    fingerprint = None  # of the whole model, which the forward itself looks at

    def __init__(self, stretches: list[Stretch], pool: Any, log: Any, keep: bool):
        self.pool = pool
        self.runners = [
            GraphRunner(nn.ModuleList([layer.module for layer in one.layers]), one.path, pool, log, _obstacle, keep)
            for one in stretches
        ]
        self.stretches = stretches
        self.__setstate__(vars(self))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("held", "ways")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.held: list[object] = [None] * len(self.stretches)  # the model as it was when a stretch was replayed last
        self.ways: list[dict] = [{} for _ in self.stretches]  # in which layers are handed what they read

    def __call__(
        self,
        eager: Callable,
        args: tuple,
        kwargs: dict,
        variant: tuple = (),
        pending: object = None,
        trusted: bool = False,
    ) -> torch.Tensor:
        """eager(*args), whose stretches are replayed. As `GraphRunner` is called; no step is launched before its call.

        trusted: the model is the one of the step before.
        """
        try:
            return eager(*args, graphs=self, variant=variant, trusted=trusted and all(self.held))
        except Stale:
            return eager(*args, graphs=self, variant=variant)

    def replay(
        self, stretch: Stretch, run: Callable, args: tuple, variant: tuple, places: list[dict], seen: object
    ) -> torch.Tensor:
        """run(*args), or the replay of its graph. seen: the model as it was found before this step; where that is the
        one of the last replay, nothing is looked at again. None: nobody has looked; raises Stale without a graph.
        """
        number = self.stretches.index(stretch)
        runner, ways = self.runners[number], self.ways[number]
        way = ways.setdefault(tuple(tuple(named.items()) for named in places), len(ways))
        if way:
            variant = (*variant, f"way {way}")
        if seen is None or self.held[number] is seen:
            replayed: Any = runner.begin(args, {}, variant, at_once=True)
            if replayed is not None:
                return replayed.outputs
        if seen is None:
            raise Stale
        outputs = runner(run, args, {}, variant)
        # Over weights whose changes nobody counts, as of inference mode, `begin` launches nothing.
        counted = runner.fingerprint is not None and runner.fingerprint.versions() is not None
        self.held[number] = seen if counted else None
        return outputs


def _obstacle(layers: nn.Module) -> str | None:
    """As of whole models, but for the hooks of accelerate in whose place the layers' forwards stand."""
    for number, layer in enumerate(layers.children()):
        if foreign_hooks(layer):
            return f"forward hooks on layer {number} would not run"
        for child in layer.children():
            if (reason := obstacle(child)) is not None:
                return reason
    return None
