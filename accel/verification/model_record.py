"""A model as a stock run called it: what it was given, what stock made of that, and how far off rounding put it."""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from accel.comparison import tensor_leaves, worst, worst_rms
from accel.errors import reason_of
from accel.fusion.float32_precision import convolutions_in_tf32, full_precision, products_in_tf32
from accel.in_flight import Here
from accel.libraries.hooks import hook_of
from accel.patching.structure import placement
from accel.tolerances import FLOOR, TIMES_STOCK, UNITS
from accel.verification.call import seeded
from accel.verification.metrics import Quality, compare
from accel.verification.precision import finer, in_dtype, upcast

# On a GPU: the first call runs eagerly, the second captures a graph, the third replays it.
CALLS_ON_GPU = 3
PLAIN = (torch.Tensor, type(None), bool, int, float, str, torch.dtype)  # arguments that a call can be repeated with


@dataclass
class ModelRecord:
    """What a module was given and what stock made of it, in the first and the last call of it."""

    module: nn.Module
    inputs: list[tuple[tuple, dict]] = field(default_factory=list)
    outputs: list[list[torch.Tensor]] = field(default_factory=list)
    exact: list[list[torch.Tensor]] | None = None
    ours: list[list[torch.Tensor]] = field(default_factory=list)  # what the optimized module made of it, when judged
    own_error: float = 0.0  # stock's relative RMS distance from full precision
    note: str = ""

    def run(self, module: nn.Module, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        """What of a call is compared."""
        return tensor_leaves(module(*args, **kwargs))

    def keep(self, inputs: tuple[tuple, dict], outputs: list[torch.Tensor]) -> None:
        del self.inputs[1:], self.outputs[1:]
        self.inputs.append(inputs)
        self.outputs.append(outputs)

    def repeat(self, seed: int) -> None:
        """What the module as it is now makes of the same inputs takes the place of what was recorded."""
        self.outputs = [self.repeated(given, seed) for given in self.inputs]

    def repeated(self, given: tuple[tuple, dict], seed: int) -> list[torch.Tensor]:
        """What the module as it is now makes of recorded inputs."""
        with seeded(seed):
            return self.run(self.module, *_cloned(given))

    @property
    def device(self) -> torch.device:
        """That its calls compute on, where its weights may come to for each."""
        given = (leaf.device for leaf in tensor_leaves(self.inputs) if leaf.dim())
        return next(given, placement(self.module)[0])

    @property
    def unit(self) -> float:
        """Half the distance of two neighboring numbers around 1: what one rounding costs at most."""
        dtype = placement(self.module)[1]
        tf32 = convolutions_in_tf32() or products_in_tf32()
        coarse = torch.float16 if dtype == torch.float32 and self.device.type == "cuda" and tf32 else dtype
        return torch.finfo(coarse).eps / 2

    @property
    def allowance(self) -> float:
        """What rounding explains where it is not measured."""
        return max(FLOOR, UNITS * self.unit)

    def measure(self) -> None:
        """How far stock itself is from the same module in full precision, or why that cannot be said."""
        dtype = placement(self.module)[1]
        if dtype == torch.float64:
            self.note = "is in float64 itself; judged by units of rounding"
            return
        wide = functools.partial(in_dtype, dtype=finer(dtype))
        try:
            twin = upcast(self.module, finer(dtype))
            with full_precision(), seeded(0):
                self.exact = [
                    self.run(twin, args, kwargs) for args, kwargs in (pytree.tree_map(wide, i) for i in self.inputs)
                ]
            self.own_error = self._distance(self.outputs)
            if self.own_error > self.allowance:
                raise ValueError(f"stock is {self.own_error:.1e} from it, which is no rounding")
        except Exception as error:  # whatever a model may raise in a precision it was not made for
            self.exact, self.own_error = None, 0.0
            reason = reason_of(error, memory=True)  # the copy in full precision takes twice or four times the module's
            self.note = f"no reference in full precision ({reason}); judged by units of rounding"

    def _distance(self, outputs: list[list[torch.Tensor]]) -> float:
        return self.apart(_joined(self.exact or []), _joined(outputs))

    def apart(self, wanted: list[torch.Tensor], got: list[torch.Tensor]) -> float:
        return worst_rms(got, wanted)

    def weights_moved_away(self) -> bool:
        """Whether its weights lie on another device than its inputs did, and nothing at its call would bring them."""
        given = [leaf for leaf in tensor_leaves(self.inputs) if leaf.dim()]
        here = placement(self.module)[0]
        return bool(given) and here not in {leaf.device for leaf in given} and hook_of(self.module) is None

    def judge(self, seed: int) -> Quality:
        """The module, optimized again, on the recorded inputs."""
        times = CALLS_ON_GPU if self.device.type == "cuda" else 1
        runs = []
        for _ in range(times):
            with seeded(seed):
                runs.append([self.run(self.module, args, kwargs) for args, kwargs in map(_cloned, self.inputs)])
        self.ours = runs[-1]
        quality = replace(compare([self.outputs] * times, runs), note=self.note)
        if self.exact is None or not all(tensor.isfinite().all() for tensor in _joined(self.exact)):
            measure = "relative RMS from stock"
            return replace(quality, error=quality.relative_rms, allowed=self.allowance, measure=measure)
        allowed = TIMES_STOCK * self.own_error + max(FLOOR, torch.finfo(placement(self.module)[1]).eps / 2)
        if not quality.stock_finite:  # stock overflows, and has no error of its own to go by
            allowed = self.allowance
        error = worst(map(self._distance, runs))
        judged = replace(quality, error=error, allowed=allowed, measure="relative RMS from full precision")
        return replace(judged, stock_error=self.own_error)


class ModelRecorder:
    """While entered, keeps calls of each model, or of its children where the model itself is not what is called.

    (A pipeline calls the decoder of a VAE.) Hooks that are removed again; inputs and outputs are copied.
    """

    def __init__(self, models: Mapping[str, nn.Module]):
        self.found: dict[str, ModelRecord] = {}
        self.refused: dict[str, str] = {}
        for name, model in models.items():
            self.found[name] = ModelRecord(model)
            for child, module in model.named_children():
                if next(module.children(), None) is None:
                    continue  # a single layer between two models, not one of them
                self.found[f"{name}.{child}" if name else child] = ModelRecord(module)
        self.handles: list[RemovableHandle] = []
        self.inside: str | None = None
        self.inputs: tuple[tuple, dict] | None = None

    def __enter__(self) -> "ModelRecorder":
        for name, record in self.found.items():
            before = Here(functools.partial(self._before, name))
            after = Here(functools.partial(self._after, name))
            # First of all pre-hooks, last of all hooks: between them lies everything a call of the module does.
            handle = record.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            self.handles += [handle, record.module.register_forward_hook(after)]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _before(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self.inside is not None:
            return
        self.inside, self.inputs = name, None
        odd = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if not isinstance(leaf, PLAIN)]
        if odd:
            self.refused[name] = f"an argument of type {type(odd[0]).__name__}"
        else:
            self.inputs = _cloned((args, kwargs))

    def _after(self, name: str, module: nn.Module, args: tuple, output: Any) -> None:
        if self.inside != name:
            return
        outputs = [tensor.detach().clone() for tensor in tensor_leaves(output)]
        if self.inputs is not None and outputs:
            self.found[name].keep(self.inputs, outputs)
        self.inside, self.inputs = None, None

    def records(self) -> dict[str, ModelRecord]:
        """What was called, by name, and can be called again by itself."""
        for name, record in self.found.items():
            if record.inputs and record.weights_moved_away():
                self.refused[name] = "offload has moved its weights away"
                record.inputs = []
        return {name: record for name, record in self.found.items() if record.inputs}

    def note(self) -> str:
        left_out = [f"{name} ({reason})" for name, reason in self.refused.items() if not self.found[name].inputs]
        return f"not compared by themselves: {', '.join(left_out)}" if left_out else ""


def _cloned(values: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, values)


def _joined(calls: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The tensors of several calls."""
    return list(itertools.chain.from_iterable(calls))
