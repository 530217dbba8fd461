"""An encoder whose layers run fused on packed tokens; the code around its layers is the model's own."""

import inspect
import sys
import threading
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn

from accel.cuda_graphs.fingerprint import Fingerprint
from accel.cuda_graphs.runner import GraphRunner
from accel.cuda_graphs.small_calls import SmallCalls
from accel.encoders.packing import Packing, padded, unpadded
from accel.encoders.stack import EncoderLayerForward, EncoderStep
from accel.errors import Unfit
from accel.in_flight import CALL
from accel.libraries.hooks import hook_of
from accel.llm.parts.step import ForwardContext
from accel.llm.recording.record import is_absent
from accel.patching.fast_forward import FastForward
from accel.patching.structure import foreign, foreign_hooks, replaced_forward

MASK = "attention_mask"
TOKENS = {"input_ids", "inputs_embeds", "token_type_ids", "position_ids"}
OUTPUTS = ("output_attentions", "output_hidden_states")


class EncoderForward(FastForward):
    """An encoder and its layers. root: the model that it is part of, or itself; blind: whether what that gives does not
    depend on rows of padding behind a text, so that none are computed in its calls. unseen: nor in others, as the user
    says. shows_mask: the code around the layers is given the mask.
    """

    renewed = ("seen", "reason", "lock", "sees")
    root: nn.Module
    stack: str
    layers: list[EncoderLayerForward]
    steps: ForwardContext
    runner: GraphRunner | None  # of the layers
    calls: SmallCalls
    blind = unseen = False
    shows_mask = False
    apart = False  # while it is tried: weights stay where they are
    seen: Fingerprint | None
    reason: str | None  # why it runs stock, as it is now
    sees: bool  # whether the caller may see rows of padding

    def renew(self) -> None:
        self.names = tuple(inspect.signature(type(self.module).forward).parameters)[1:]
        self.seen, self.reason, self.sees = None, None, True
        self.lock = threading.Lock()

    @property
    def windows(self) -> bool:
        """Whether a layer attends to what is near alone."""
        return any(layer.spec.has_position_bias for layer in self.layers)

    @property
    def rotates(self) -> bool:
        """Whether a layer computes by where tokens stand."""
        return any(layer.spec.keywords for layer in self.layers)

    def unfit(self, *args: Any, **kwargs: Any) -> str | None:
        given = {name: one for name, one in self.named(args, kwargs).items() if not is_absent(one)}
        for name in OUTPUTS:
            if given.pop(name, None) or (name not in kwargs and getattr(self.module.config, name, False)):
                return f"{name}: its layers run stock where each is looked at"
        given.pop("return_dict", None)
        mask = given.pop(MASK, None)
        unknown = next((name for name in given if name not in TOKENS), None)
        if unknown is not None:
            return f"{unknown} is given"
        if mask is not None and (type(mask) is not torch.Tensor or mask.dim() != 2):
            return "a mask that is not one of tokens, (batch, length)"
        if mask is not None and mask.is_cuda and torch.cuda.is_current_stream_capturing() and not self.calls.unpadded:
            return "a mask that cannot be looked at, as a CUDA graph is being captured"
        return self.ready()

    def fast(self, *args: Any, **kwargs: Any) -> Any:
        named = self.named(args, kwargs)
        mask = named.get(MASK)
        step = EncoderStep(self.layers, partial(self.run, mask))
        if not self.shows_mask:
            named.pop(MASK, None)
        with self.steps.taken(step):
            result = self.stock(**named)
        if not step.done:
            raise Unfit("not all of its layers were called")
        return result

    def run(self, mask: torch.Tensor | None, step: EncoderStep) -> torch.Tensor:
        """The hidden states behind the last layer, (B, L, C)."""
        assert step.hidden is not None
        apart = self.runner is None or self.apart or self.calls.unpadded  # the last: in the graph of a small call
        graph = not apart and step.hidden.is_cuda and not torch.cuda.is_current_stream_capturing()
        packing = step.packing = self.packing(step.hidden, mask, graph)
        x = packing.pack(step.hidden)[None]
        for layer, kwargs in zip(self.layers, step.calls, strict=True):
            if layer.spec.keywords:
                layer.bound.attention.angles(step, kwargs)
        given = x, packing.starts, packing.keys, packing.longest, step.prepared()
        if graph and self.runner is not None:
            compute = partial(self._layers, step)
            x = self.runner(compute, given, {}, without_graph=partial(compute, *given))
        else:
            x = self._layers(step, *given)
        return packing.unpack(x[0], *step.shape)

    def _layers(self, step: EncoderStep, x: torch.Tensor, starts: Any, keys: Any, longest: int, angles: list) -> Any:
        """All layers, of packed tokens; a graph for each form of these."""
        step.packing = step.packing._replace(starts=starts, keys=keys, longest=longest)
        step.prepare(angles)
        for layer, kwargs in zip(self.layers, step.calls, strict=True):
            x = layer.bound(self.kernels, step, x, kwargs)
        return x

    def packing(self, x: torch.Tensor, mask: torch.Tensor | None, graph: bool) -> Packing:
        """Of the layers' input, (B, L, C). graph: in one of the sizes that graphs have."""
        if mask is None or self.calls.unpadded:
            return unpadded(x, graph)
        if mask.shape != x.shape[:2] or mask.device != x.device:
            raise Unfit("a mask of another shape, or on another device")
        hidden = self.unseen or (not self.sees and self._inside_root())
        return padded(x, mask.bool(), hidden, self.windows, self.windows or self.rotates, graph)

    def ready(self) -> str | None:
        """Binds the layers to the weights where the model has changed. Returns why they no longer fit it."""
        with self.lock:
            if self.seen is None or not (self.seen.reachable() and self.seen.holds()):
                self.reason = self._bind()
                self.sees = not self.blind or (not self.unseen and self.watched())
                self.seen = Fingerprint(self.root)
            return self.reason

    def _bind(self) -> str | None:
        if [id(one) for one in self.module.get_submodule(self.stack)] != [id(layer.module) for layer in self.layers]:
            return "its layers are not those that were optimized"
        moved = next((path for path, one in self.module.named_modules() if hook_of(one) is not None), None)
        if moved is not None:
            return f"an accelerate hook on {moved or 'the model'}"
        if len({p.device for p in self.module.parameters()}) > 1 or any(p.is_meta for p in self.module.parameters()):
            return "weights on several devices, or not loaded"
        for layer in self.layers:
            if foreign_hooks(layer.module):
                return f"{layer.path} has forward hooks"
            if (reason := layer.bind(not self.apart)) is not None:
                return reason
        return None

    def watched(self) -> bool:
        """Whether code of the user's inside of the root may see the hidden states."""
        every = [self.root, *self.root.modules()]
        return any(foreign_hooks(one) or replaced_forward(one) or foreign(one) for one in every)

    def _inside_root(self) -> bool:
        """Whether this is part of a call of the root, by the frames of this thread."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is CALL and frame.f_locals.get("self") is self.root:
                return True
            frame = frame.f_back
        return False
