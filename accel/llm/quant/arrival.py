"""The quantised linears a model arrived with, repacked into ours, and given back."""

from accel_kernels import Quantised
from torch import nn

from accel.llm.quant.arrived import Arrived, CompressedTensors, of_package
from accel.llm.quant.compressed import scheme_of
from accel.llm.quant.foreign import Awq, Bitsandbytes8, Gptq
from accel.llm.quant.saving import guard
from accel.quant.activations import FIXED, SCALE
from accel.quant.module import QuantisedLinear
from accel.quant.scheme import Scheme
from accel.quant.swap import Swap, exchange
from accel.structure import hooked, placement

KINDS = (CompressedTensors, Gptq, Awq, Bitsandbytes8)


class Arrival(Swap):
    """A patch: (arrived, quantised) linears of one model. The numbers are held once, by those that are in place.

    rows: (path, status, reason) of every quantised linear that was found. A hook by which compressed-tensors would
    dequantise the whole model at its first call is taken off once there is nothing left for it.
    """

    def __init__(self, root: nn.Module, activations: str | None = None):
        super().__init__(root, True, guard(root))
        self.activations = activations
        self.found: dict[str, Arrived] = {}
        self.rows: list[tuple[str, str, str]] = []
        self.dtype = placement(root)[1]
        self.head = set(root.get_output_embeddings().modules())
        for path, module in root.named_modules():
            answer = _recognised(module, self.dtype)
            if isinstance(answer, Arrived):
                self.found[path] = answer
                scheme = self._scheme(answer, answer.read())
                note = f"; {answer.note}" if answer.note and scheme.activations is None else ""
                self.rows.append((path, "patched", f"{scheme}, arrived as {answer.kind}{note}"))
            elif answer is not None:
                self.rows.append((path, "skipped", answer))
        self.hooks: dict = {}

    def put(self) -> None:
        self.there = True
        if self.found and self.guard is not None:
            self.guard.apply()
        for arrived in self.found.values():
            quantised = arrived.read()
            scheme = self._scheme(arrived, quantised)
            new = QuantisedLinear(quantised, arrived.bias, self.dtype, scheme, input_scale=arrived.input_scale)
            self.pairs.append((arrived, new))
            arrived.release()
        exchange(self.root, [(arrived.module, new) for arrived, new in self.pairs])
        if self.found and not any(status == "skipped" for _, status, _ in self.rows):
            self._take_hooks()

    def _scheme(self, arrived: Arrived, quantised: Quantised) -> Scheme:
        """Its own, with activations rounded where they are to be and can be: not of the output head."""
        scheme = scheme_of(quantised)
        exact = self.activations is None or arrived.module in self.head
        fixed = arrived.input_scale is not None and FIXED.get(self.activations) == SCALE
        rounding = scheme if exact else scheme.rounding(self.activations, fixed)
        return scheme if isinstance(rounding, str) else rounding

    def _take_hooks(self) -> None:
        hooks = vars(self.root)["_forward_pre_hooks"]
        self.hooks = {key: hook for key, hook in hooks.items() if of_package(hook)}
        for key in self.hooks:
            del hooks[key]

    def apply(self) -> None:
        if self.there:
            return
        try:
            self.put()
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        if not self.there:
            return
        if self.found and self.guard is not None:
            self.guard.undo()
        vars(self.root)["_forward_pre_hooks"].update(self.hooks)
        exchange(self.root, [(new, arrived.module) for arrived, new in self.pairs])
        while self.pairs:
            arrived, new = self.pairs[-1]
            arrived.refill(new.quantised, None if new.dtype == self.dtype else new.dtype)
            self.pairs.pop()
            new.data = new.data.new_empty(0)  # before the next: whoever still holds the layer holds no second copy
        self.hooks, self.there = {}, False


def _recognised(module: nn.Module, dtype) -> Arrived | str | None:
    """What it is, or why it is left alone; None for a module that holds no numbers in fewer bits."""
    for kind in KINDS:
        try:
            answer = kind.recognise(module, dtype)
            if isinstance(answer, Arrived):
                answer.read()
        except ValueError as error:
            return str(error)
        except Exception as error:  # whatever tensors of other shapes, or without memory, may raise
            return f"its tensors cannot be read: {type(error).__name__}"
        if answer is None:
            continue
        if isinstance(answer, str):
            return answer
        if reason := hooked(module):
            return reason
        return answer
    return None
