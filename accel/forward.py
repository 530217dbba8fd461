"""The fast forward of one module: takes the call where it is safe, hands it to the stock forward where it is not."""

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields

import torch
import torch.nn.functional as F
from accel_kernels import (
    Op,
    attend,
    experts,
    gated,
    group_norm,
    image_concat,
    image_sum,
    layer_norm,
    linear_geglu,
    projection,
    quantised_projection,
    rms_norm,
    upsample_convolve,
)
from accel_kernels.attention_backends import AttentionChooser
from accel_kernels.prompt_attention import PromptAttention
from torch import nn

from accel.ledger import Ledger
from accel.structure import hooked


@dataclass(frozen=True)
class Kernels:
    """The operations fast forwards are written in; `plain()` gives the same ones in torch alone, for probes."""

    attention: object
    linear: object
    prompt: PromptAttention = field(default_factory=PromptAttention)
    attend: object = attend
    experts: object = experts
    gated: object = gated
    group_norm: object = group_norm
    image_concat: object = image_concat
    image_sum: object = image_sum
    layer_norm: object = layer_norm
    linear_geglu: object = linear_geglu
    projection: object = projection
    quantised_projection: object = quantised_projection
    rms_norm: object = rms_norm
    upsample_convolve: object = upsample_convolve

    def plain(self) -> "Kernels":
        references = {one.name: one.default.reference for one in fields(self) if isinstance(one.default, Op)}
        return Kernels(AttentionChooser("sdpa"), F.linear, **references)


class FastForward(ABC):
    """Callable that stands in `vars(module)["forward"]`.

    A module-level class holding its module: pickle and deepcopy rebind it to the copy, and generate() sees the stock
    signature. Subclasses give `fast(*args, **kwargs)` and `unfit(*args, **kwargs)`: None, or why this call runs stock.
    """

    def __init__(self, module: nn.Module, path: str, kernels: Kernels, ledger: Ledger):
        self.__setstate__({"module": module, "path": path, "kernels": kernels, "ledger": ledger})

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name not in ("kind", "function")}

    def __setstate__(self, state):
        vars(self).update(state)
        self.kind, self.function = type(self.module), type(self.module).forward

    @property
    def __signature__(self) -> inspect.Signature:
        stock = inspect.signature(type(self.module).forward)
        return stock.replace(parameters=list(stock.parameters.values())[1:])

    def stock(self, *args, **kwargs):
        # The compiler cannot look a method up on a class that diffusers allows in its graphs; it can call a function.
        if torch.compiler.is_compiling() and type(self.module) is self.kind:
            return self.function(self.module, *args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args, **kwargs):
        if torch.compiler.is_compiling():  # the user compiles on top: leave the graph to the compiler
            return self.stock(*args, **kwargs)
        reason = self.mode() or self.unfit(*args, **kwargs)
        if reason is None:
            return self.fast(*args, **kwargs)
        self.ledger.fell_back(self.path, reason)
        return self.stock(*args, **kwargs)

    def mode(self) -> str | None:
        """Reasons that hold for every fused forward: training, gradients, autocast."""
        if self.module.training:
            return "training mode"
        if torch.is_grad_enabled():
            return "gradients are on (call it under torch.no_grad or torch.inference_mode)"
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            return "autocast is on"
        return None

    def unfit(self, *args, **kwargs) -> str | None:
        return None

    @classmethod
    def taken(cls, module: nn.Module, *args, **kwargs):
        """The fast forward of this class that calling the module with these arguments would run; None if another would.

        For whoever calls a part of it instead, to leave its last addition to the next fused operation.
        """
        forward = vars(module).get("forward")
        if type(forward) is not cls or hooked(module) or torch.compiler.is_compiling():
            return None
        return forward if (forward.mode() or forward.unfit(*args, **kwargs)) is None else None

    @abstractmethod
    def fast(self, *args, **kwargs):
        """The fused forward; arguments and result as the stock one."""
