"""The fast forward of one module: takes the call where it is safe, hands it to the stock forward where it is not."""

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from accel_kernels import geglu, group_norm, layer_norm, residual_add, upsample
from accel_kernels.attention_backends import AttentionChooser
from torch import nn

from accel.ledger import Ledger


@dataclass(frozen=True)
class Kernels:
    """The operations fast forwards are written in; `plain()` gives the same ones in torch alone, for probes."""

    attention: object
    geglu: object = geglu
    group_norm: object = group_norm
    layer_norm: object = layer_norm
    residual_add: object = residual_add
    upsample: object = upsample

    def plain(self) -> "Kernels":
        names = ("geglu", "group_norm", "layer_norm", "residual_add", "upsample")
        return Kernels(AttentionChooser("sdpa"), **{name: getattr(self, name).reference for name in names})


class FastForward(ABC):
    """Callable that stands in `vars(module)["forward"]`.

    A module-level class holding its module: pickle and deepcopy rebind it to the copy, and generate() sees the stock
    signature. Subclasses give `fast(*args, **kwargs)` and `unfit(*args, **kwargs)`: None, or why this call runs stock.
    """

    def __init__(self, module: nn.Module, path: str, kernels: Kernels, ledger: Ledger):
        self.module, self.path, self.kernels, self.ledger = module, path, kernels, ledger

    @property
    def __signature__(self) -> inspect.Signature:
        stock = inspect.signature(type(self.module).forward)
        return stock.replace(parameters=list(stock.parameters.values())[1:])

    def stock(self, *args, **kwargs):
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

    @abstractmethod
    def fast(self, *args, **kwargs):
        """The fused forward; arguments and result as the stock one."""
