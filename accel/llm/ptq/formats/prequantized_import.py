"""The quantized linears a model arrived with, to be repacked into ours, and given back."""

from typing import Any

import torch
from accel_kernels import Quantized
from torch import nn
from transformers import PreTrainedModel

from accel.errors import reason_of
from accel.libraries.adapters import readapt
from accel.libraries.code import lacks_kernel
from accel.libraries.loading import HfQuantizer
from accel.patching.owner import InstanceMethod
from accel.patching.rule import ForwardPatch, Patch
from accel.patching.structure import placement
from accel.quantization.activations import FIXED, SCALE
from accel.quantization.formats.compressed_tensors import of_package, scheme_of
from accel.quantization.formats.repacked import Repacked
from accel.quantization.formats.stored import StoredWeight
from accel.quantization.formats.stored_forward import StoredExperts, StoredForward, packed_experts
from accel.quantization.formats.stored_weight import recognize
from accel.quantization.module import QuantizedLinear
from accel.quantization.patch import QuantizedModulePatch, exchange
from accel.quantization.scheme import Scheme

OWN = "it runs its own forward: "


class PrequantizedImport(QuantizedModulePatch):
    """A patch: (arrived, quantized) linears of one model. The numbers are held once, by those that are in place.

    rows: (path, status, reason) of every quantized linear that was found. forwards: of linears whose own round their
    inputs. A hook by which compressed-tensors would dequantize the whole model at its first call is taken off where
    all is read; else it runs now, for it cannot once forwards are replaced.
    """

    def __init__(self, root: PreTrainedModel, activations: str | None = None):
        super().__init__(root, True)
        self.activations = activations
        self.found: dict[str, Repacked] = {}
        self.rows: list[tuple[str, str, str]] = []
        self.forwards: list[Patch] = []
        self.dtype = placement(root)[1]
        self.head = set(root.get_output_embeddings().modules())
        for path, module in root.named_modules():
            answer = recognize(module, self.dtype)
            if isinstance(answer, Repacked):
                self.found[path] = answer
                scheme = self._scheme(answer, answer.read())
                note = f"; {answer.note}" if answer.note and scheme.activations is None else ""
                self.rows.append((path, "patched", f"{scheme}, arrived as {answer.kind}{note}"))
            elif isinstance(answer, str):
                self.rows.append((path, "skipped", f"{OWN}{answer}"))
            elif answer is not None:
                self._stored(path, module, answer)
            elif packed_experts(module):
                self.rows.append((path, "patched", "float8, read as it came, as the kernel for its experts is missing"))
                self.forwards.append(ForwardPatch(module, StoredExperts(module)))
        self.hooks = {key: one for key, one in vars(root)["_forward_pre_hooks"].items() if of_package(one)}
        unread = [reason for _, status, reason in self.rows if status == "skipped"]
        self.dequantizes = bool(self.hooks) and (bool(unread) or not self.found)
        if self.dequantizes:
            self.found, why = {}, "".join(unread[:1]).removeprefix(OWN)
            reason = f"its library dequantizes the whole model: {why}"
            self.rows = [(path, "skipped", reason) for path, *_ in self.rows]
        if self.found:
            self.forwards.append(Patch(root, Dequantize.name, Dequantize(self)))

    def _stored(self, path: str, module: nn.Module, held: StoredWeight) -> None:
        note = "" if held.step is None else "; its inputs keep their dtype, and its own kernel rounds them"
        missing = lacks_kernel(module)
        note = note or ("; the package that its own product needs is missing" if missing else "")
        self.rows.append((path, "patched", f"{held.weight.format.name}, read as it came{note}"))
        if held.step is not None or missing:
            self.forwards.append(ForwardPatch(module, StoredForward(module)))

    def repack(self) -> None:
        self.there = True
        if self.dequantizes:
            given, self.hooks, self.dequantizes = self.hooks, {}, False
            try:
                for hook in given.values():
                    hook(self.root, ())
            except Exception as error:  # of tensors that do not fit: so will the model's first call
                self.rows = [
                    (path, status, f"{text}, which raised {reason_of(error)}") for path, status, text in self.rows
                ]
        for forward in self.forwards:
            forward.apply()
        for prequantized in self.found.values():
            quantized = prequantized.read()
            scheme = self._scheme(prequantized, quantized)
            bias, fixed = prequantized.bias(self.dtype), prequantized.input_scale
            scale = None if fixed is None else fixed(prequantized.module)
            new = QuantizedLinear(quantized, bias, self.dtype, scheme, input_scale=scale)
            new.arrived = prequantized
            self.pairs.append((prequantized, new))
            prequantized.release()
        exchange(self.root, [(prequantized.module, new) for prequantized, new in self.pairs])
        hooks = vars(self.root)["_forward_pre_hooks"]
        self.hooks = {key: hook for key, hook in self.hooks.items() if hooks.pop(key, None) is not None}

    def _scheme(self, prequantized: Repacked, quantized: Quantized) -> Scheme:
        """Its own, with activations rounded where they are to be and can be: not of the output head."""
        scheme, activations = scheme_of(quantized), self.activations
        if activations is None or prequantized.module in self.head:
            return scheme
        fixed = prequantized.input_scale is not None and FIXED.get(activations) == SCALE
        rounding = scheme.rounding(activations, fixed)
        return scheme if isinstance(rounding, str) else rounding

    def apply(self) -> None:
        if self.there:
            return
        try:
            with torch.inference_mode(False), torch.no_grad():
                self.repack()
        except BaseException:
            self.undo()
            raise

    def check(self) -> None:
        super().check()
        for forward in self.forwards:
            forward.check()

    def undo(self) -> None:
        if not self.there:
            return
        vars(self.root)["_forward_pre_hooks"].update(self.hooks)
        self.give_back()
        for forward in reversed(self.forwards):
            forward.undo()
        self.there = False

    def give_back(self) -> None:
        """Puts the arrived linears in their places, for good."""
        exchange(self.root, [(new, prequantized.module) for prequantized, new in self.pairs])
        while self.pairs:
            prequantized, new = self.pairs[-1]
            assert isinstance(new, QuantizedLinear)
            prequantized.refill(new.quantized)
            new.arrived = None
            self.pairs.pop()
            new.data = new.data.new_empty(0)  # before the next: whoever still holds the layer holds no second copy
        readapt(self.root)


class Dequantize(InstanceMethod):
    """Of a model: gives the arrived linears back before its library writes them out, which knows no others."""

    name = "dequantize"

    def __init__(self, swap: PrequantizedImport):
        self.swap = swap

    @property
    def owner(self) -> Any:
        return self.swap.root

    def call(self, *args: Any, **kwargs: Any) -> Any:
        stock = HfQuantizer._dequantize  # which raises
        if getattr(type(getattr(self.owner, "hf_quantizer", None)), "_dequantize", stock) is not stock:
            self.swap.give_back()
        return self.stock(*args, **kwargs)
