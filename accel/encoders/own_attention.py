"""Encoders whose layers are not understood: their own code runs, with its attentions fused inside."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from accel.cuda_graphs.fingerprint import Fingerprint
from accel.encoders.inputs import Inputs
from accel.encoders.packing import EMPTY
from accel.encoders.waiting_scores import FusedProducts, all_computed
from accel.errors import reason_of
from accel.in_flight import listening
from accel.llm.recording.record import NotUnderstood, is_absent
from accel.patching.fast_forward import FastForward
from accel.patching.structure import CallersHook, foreign, foreign_hooks, placement, replaced_forward

ASKED = "output_attentions"
ALONE = "attentions are fused inside of its own code"  # as the report says
INSIDE: ContextVar[bool] = ContextVar("accel_inside_own_code", default=False)  # of a call in which attentions are fused


class OwnAttention(FastForward):
    """A module in whose forward products of queries and keys wait, while a call of its encoder is under way."""

    beneath = True

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return (self.fast if INSIDE.get() else self.stock)(*args, **kwargs)

    def fast(self, *args: Any, **kwargs: Any) -> Any:
        with FusedProducts():
            return self.stock(*args, **kwargs)


class OwnCodeForward(FastForward):
    """An encoder around such modules. What waits beside its attentions, shares that nobody asks for, is dropped.

    rounds: numbers of a sequence that is all padding are what rounding makes of them, as Funnel's. tried: the dtype in
    which this was found out; in float16 it is so of all rows that see nothing, as a mask is no less than -65504 there.
    """

    renewed = ("seen", "reason")
    forgotten = ("seen",)
    inputs: Inputs
    apart = rounds = False  # the former as of `EncoderForward`
    tried: torch.dtype
    seen: Fingerprint | None
    reason: str | None  # why it runs stock, as it is now

    def renew(self) -> None:
        self.seen, self.reason = None, None

    def unfit(self, *args: Any, **kwargs: Any) -> str | None:
        asked = self.named(args, kwargs).get(ASKED)
        if getattr(self.module.config, ASKED, False) if is_absent(asked) else asked:
            return f"{ASKED}: its attentions run stock"
        if self.unlike(args, kwargs):
            return EMPTY
        half = placement(self.module)[1]
        if (
            half is torch.float16
            and half is not self.tried
            and self.named(args, kwargs).get(self.inputs.mask) is not None
        ):
            return f"a mask in float16, where {self.tried} was tried: optimize it again"
        if self.seen is None or not (self.seen.reachable() and self.seen.holds()):
            every = self.module.modules()
            looked = any(foreign_hooks(one, CallersHook) or replaced_forward(one) or foreign(one) for one in every)
            self.reason = "code of the user's looks into it" if looked else None
            self.seen = Fingerprint(self.module)
        return self.reason

    def unlike(self, args: tuple, kwargs: dict) -> bool:
        """Whether a call has such a sequence. Waits for the GPU."""
        mask = self.named(args, kwargs).get(self.inputs.mask) if self.rounds else None
        if not isinstance(mask, torch.Tensor) or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
            return False
        return not bool(mask.flatten(1).any(1).all())

    def fast(self, *args: Any, **kwargs: Any) -> Any:
        token = INSIDE.set(True)
        try:
            return all_computed(self.stock(*args, **kwargs))
        finally:
            INSIDE.reset(token)

    def late(self, args: tuple, kwargs: dict) -> "tuple[dict[str, Any], Callable[[Any], Any]] | None":
        """See `EncoderForward`."""
        return None


def own_attentions(model: Any, call: dict[str, Any]) -> dict[str, nn.Module]:
    """By path the modules in whose forwards attentions begin and end that can be fused, in a call of the model."""
    running: list[nn.Module] = []
    modules = list(model.modules())[1:]

    def ends(*_: Any) -> None:
        running.pop()

    begin = listening([(one, lambda module, *_: running.append(module)) for one in modules], before=True)
    end = listening((one, ends) for one in modules)
    try:
        with begin, end, FusedProducts(lambda: tuple(running)) as fused:
            type(model).forward(model, **call)
    except Exception as error:  # whatever a forward may raise
        raise NotUnderstood(f"could not be examined: {reason_of(error)}") from error
    if fused.left:
        raise NotUnderstood("some of its attentions are of another kind")
    around = [[a for a, b in zip(one.began, one.ended, strict=False) if a is b] for one in fused.seen]
    found = {one[-1] for one in around if one}
    return {path: one for path, one in model.named_modules() if one in found}
