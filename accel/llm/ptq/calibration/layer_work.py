"""One decoder layer while its weights are being quantized."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate
from typing import TypeVar

import torch
from accel_kernels import Quantized
from accel_kernels.rowwise.row_numbers import LEAST_PEAK, MOST
from torch import Tensor, nn

from accel.in_flight import listening
from accel.llm.ptq.calibration.folding import FoldGroup
from accel.llm.ptq.calibration.layer_inputs import LayerCall, first
from accel.llm.ptq.calibration.linears import put, weight_matrix
from accel.llm.recording.resting import resting
from accel.quantization.activations import FIXED, KERNELS, SCALE
from accel.quantization.linears import Dense
from accel.quantization.rounding import round_to_nearest
from accel.quantization.scheme import Scheme


def rounded_by_token(x: Tensor) -> Tensor:
    """x: (..., K), each row as its 8-bit numbers and scale stand for, in the dtype of x."""
    return KERNELS.rounded(x, "int8").dequantized(x.dtype)


def rounded_by_tensor(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """The same by one scale, (1,) float32; without one by that of the largest value in x."""
    if scale is None:
        scale = (x.float().abs().max() / MOST[torch.int8]).clamp_min(LEAST_PEAK).view(1)
    return KERNELS.rounded(x, "int8-static", fixed=scale).dequantized(x.dtype)


def rounding_inputs(
    modules: Iterable[nn.Module], scales: Mapping[nn.Module, Tensor] | None = None
) -> AbstractContextManager[None]:
    """Inside, inputs of these linears are rounded by token; with scales by tensor, by a linear's own if there."""

    def rounded(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        by: Callable[[Tensor], Tensor] = rounded_by_token
        if scales is not None:
            by = partial(rounded_by_tensor, scale=scales.get(module))
        return tuple(map(by, args)), {name: by(value) for name, value in kwargs.items()}

    return listening(((module, rounded) for module in modules), before=True)


Watcher = TypeVar("Watcher", bound=Callable[[Tensor], None])
JUDGED = 65536  # tokens, at least one call's, on which ways to round a layer are compared; as many as in AWQ's paper


class LayerWork:
    """linears: those to be quantized, by full path. calls: see `LayerInputs`; wanted: the stock layer's outputs, of as
    many of the first calls as are judged by.

    fake_quant: whether inputs of the linears are rounded to int8 whenever the layer runs, but for `wanted`. quantized,
    changed, fixed (see `FIXED`): the results, by full path. notes: for the report. Raises ValueError for NaN or Inf
    among the weights.
    """

    def __init__(self, layer: nn.Module, scheme: Scheme, linears: dict[str, Dense], calls: list[LayerCall]):
        self.layer, self.scheme, self.linears, self.calls = layer, scheme, linears, calls
        self.fake_quant = False
        self.quantized: dict[str, Quantized] = {}
        self.changed: dict[str, nn.Parameter] = {}
        self.fixed: dict[str, Tensor] = {}
        self.notes: list[str] = []
        for path, module in linears.items():
            if not bool(module.weight.isfinite().all()):
                raise ValueError(f"{path}: NaN or Inf among the weights")
        tokens = list(accumulate(len(call.rows(call.hidden)) for call in calls))
        self.judged = calls[: max(1, sum(count <= JUDGED for count in tokens))]
        self.wanted = list(self._outputs(self.judged))

    def outputs(self) -> list[Tensor]:
        """What the layer gives as it is now, call by call."""
        return list(self._outputs(self.calls))

    def error(self, given: list[Tensor] | None = None) -> float:
        """Mean square of what these outputs, of all calls, are off, or those of the layer as it is now."""
        found = self._outputs(self.judged) if given is None else given[: len(self.judged)]
        calls = zip(self.judged, found, self.wanted, strict=True)
        return _mean_square(call.rows(got).float() - call.rows(wanted).float() for call, got, wanted in calls)

    def signal(self) -> float:
        """Mean square of what the stock layer adds to its hidden states; these themselves are often much larger."""
        calls = zip(self.judged, self.wanted, strict=True)
        return _mean_square(call.rows(wanted).float() - call.rows(call.hidden).float() for call, wanted in calls)

    def observe(self, watchers: Mapping[str, Callable[[Tensor], None]]) -> None:
        """Calls watchers, by path of a linear, with the inputs (tokens, K) it is given, without those of padding.

        Raises ValueError for NaN or Inf among them.
        """

        def watched(path: str) -> Callable[[int, Tensor], None]:
            def watch(number: int, given: Tensor) -> None:
                rows = self.calls[number].rows(given)
                if not bool(rows.isfinite().all()):
                    raise ValueError(f"{path}: NaN or Inf among its inputs, for batch {number} of the calibration")
                watchers[path](rows)

            return watch

        self._listen({path: watched(path) for path in watchers})

    def inputs(self, groups: Iterable[FoldGroup], make: Callable[[], Watcher]) -> dict[FoldGroup, Watcher]:
        """make() for each of these groups, after it was called with all that the group is given, see `observe`."""
        mine = {group: [path for path in group.paths if path in self.linears] for group in groups}
        watchers = {group: make() for group, paths in mine.items() if paths}
        self.observe({mine[group][0]: watcher for group, watcher in watchers.items()})
        return watchers

    def stages(self) -> list[list[str]]:
        """The linears that are called, in that order, those together that are given the same tensor."""
        stages: dict[tuple[int, int], list[str]] = {}
        held: list[Tensor] = []  # or another tensor could get the place, and the id, of one that is gone
        found: set[str] = set()

        def watched(path: str) -> Callable[[int, Tensor], None]:
            def watch(number: int, given: Tensor) -> None:
                if path not in found:
                    found.add(path)
                    held.append(given)
                    stages.setdefault((number, id(given)), []).append(path)

            return watch

        self._listen({path: watched(path) for path in self.linears})
        return list(stages.values())

    def _listen(self, listeners: dict[str, Callable[[int, Tensor], None]]) -> None:
        """Runs all calls; listeners get a call's number and the tensor a linear is given."""
        number = 0

        def hook(listener: Callable) -> Callable:
            def given(module: nn.Module, args: tuple, kwargs: dict) -> None:
                listener(number, next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)))

            return given

        hooks = ((self.linears[path], hook(listener)) for path, listener in listeners.items())
        with listening(hooks, before=True), resting(self.layer):
            for number, call in enumerate(self.calls):  # noqa: B007, which the hooks read
                self.layer(*call.args, **call.kwargs)

    def nearest(self, path: str) -> Quantized:
        """A linear's weight as it is now, rounded to nearest."""
        return round_to_nearest(weight_matrix(self.linears[path]), self.scheme)

    def _outputs(self, calls: list[LayerCall]) -> Iterator[Tensor]:
        rounding = self.linears if self.fake_quant else {}
        by_tensor = FIXED.get(self.scheme.activations) == SCALE
        return outputs(self.layer, calls, rounding, self.fixed if by_tensor else None)

    def keep(self, path: str, quantized: Quantized) -> None:
        """A linear's weight is this from now on."""
        self.quantized[path] = quantized
        module = self.linears[path]
        put(module, quantized.dequantized(module.weight.dtype))

    def round(self) -> None:
        """Keeps all weights rounded to nearest."""
        for path in self.linears:
            self.keep(path, self.nearest(path))

    def round_rest(self) -> None:
        """Keeps those rounded to nearest that are not quantized yet, for want of inputs."""
        for path in self.linears:
            if path not in self.quantized:
                self.notes.append(f"{path}: rounded to nearest, no token of the calibration reaches it")
                self.keep(path, self.nearest(path))


def outputs(
    layer: nn.Module,
    calls: Iterable[LayerCall],
    rounding: Mapping[str, nn.Module] = {},
    scales: Mapping[str, Tensor] | None = None,
) -> Iterator[Tensor]:
    """A layer's outputs, call by call. rounding: modules, by path, with int8 inputs; see `rounding_inputs`."""
    own = None if scales is None else {rounding[path]: scale for path, scale in scales.items() if path in rounding}
    with resting(layer), rounding_inputs(rounding.values(), own):
        for call in calls:
            yield first(layer(*call.args, **call.kwargs))


def _mean_square(parts: Iterable[Tensor]) -> float:
    total = count = 0.0
    for part in parts:
        total += float(part.square().sum(dtype=torch.float64))
        count += part.numel()
    return total / max(count, 1.0)
