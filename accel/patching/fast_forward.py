"""The fast forward of one module: runs fused where that is safe, and the stock forward where it is not."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from itertools import chain
from types import CodeType
from typing import Any, TypeVar

import accel_kernels as ops
import torch
from accel_kernels import Op
from accel_kernels.attention.backends import AttentionChooser
from accel_kernels.attention.prefill_attention import PromptAttention
from accel_kernels.gemm.linear import torch_linear
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

from accel.casting import cast_up
from accel.errors import Unfit, reason_of
from accel.patching.arguments import Arguments
from accel.patching.code import ClassCode, Code
from accel.patching.fallback_log import FallbackLog
from accel.patching.guard import Guard, Parts, another_class, changed_since
from accel.patching.owner import InstanceMethod
from accel.patching.structure import foreign, hooked

AS_WRITTEN: ContextVar[bool] = ContextVar("accel_as_written", default=False)  # inside `as_written`
NOTHING = nullcontext()
# Tensors without numbers, and tensors that write down what is done with them.
TRACERS = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))
STOCK = "_accel_stock"  # marks an error that a stock forward raised: no stock forward around it is tried


@contextmanager
def as_written() -> Iterator[None]:
    """Inside, every fast forward that this thread calls runs stock."""
    token = AS_WRITTEN.set(True)
    try:
        yield
    finally:
        AS_WRITTEN.reset(token)


def transformation() -> str | None:
    """The transformation that this thread is inside of; None for none. Cheap, as it is asked at every call."""
    if torch._C._are_functorch_transforms_active():
        return "a transformation of torch.func is under way"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is on"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit traces it"
    if torch._C._len_torch_dispatch_stack() and any(map(torch._C._get_dispatch_mode, TRACERS)):
        return "torch traces it, or runs it on fake tensors"
    return None


@dataclass(frozen=True)
class Kernels:
    """The operations fast forwards are written in; `plain()` gives the same ones in torch alone, for probes."""

    attention: Any
    linear: Any
    prompt: PromptAttention = field(default_factory=PromptAttention)
    paged_attention: Any = ops.paged_attention
    packed_attention: Any = ops.packed_attention
    causal_convolution: Any = ops.causal_convolution
    convolution_frames: Any = ops.convolution_frames
    experts: Any = ops.experts
    gated: Any = ops.gated
    group_norm: Any = ops.group_norm
    image_concat: Any = ops.image_concat
    image_sum: Any = ops.image_sum
    latent_attention: Any = ops.latent_attention
    layer_norm: Any = ops.layer_norm
    linear_attention_prompt: Any = ops.linear_attention_prompt
    linear_attention_step: Any = ops.linear_attention_step
    linear_geglu: Any = ops.linear_geglu
    mixture: Any = ops.mixture
    fused_linear: Any = ops.fused_linear
    quantized_linear: Any = ops.quantized_linear
    norm_add: Any = ops.norm_add
    rms_norm: Any = ops.rms_norm
    rotated_heads: Any = ops.rotated_heads
    route: Any = ops.route
    rowwise: Any = ops.rowwise
    selective_scan: Any = ops.selective_scan
    upsample_convolve: Any = ops.upsample_convolve

    def plain(self) -> "Kernels":
        references: dict[str, Any] = {
            one.name: one.default.reference for one in fields(self) if isinstance(one.default, Op)
        }
        return Kernels(AttentionChooser("sdpa"), torch_linear, **references)


Forward = TypeVar("Forward", bound="FastForward")


class FastForward(InstanceMethod):
    """Callable that stands in `vars(module)["forward"]`.

    A module-level class holding its module: pickle and deepcopy rebind it to the copy, and generate() sees the stock
    signature. Subclasses give `fast(*args, **kwargs)` and `unfit(*args, **kwargs)`: None, or why this call runs stock.
    Both are asked only about calls that `fast` and the stock forward take alike.
    """

    name = "forward"
    module: Any  # of the kind that was matched, whose attributes subclasses read
    path: str
    kernels: Kernels
    log: FallbackLog
    kind: type[nn.Module]
    names: tuple[str, ...]  # of the stock forward's parameters; some subclasses set their own
    guard: Guard | None
    stale: str | None
    # What another library put in place of the module's forward, and stock is called by: accelerate's wrapper, or the
    # closure by which transformers divides a layer.
    around: Callable | None = None
    forgotten: tuple[str, ...] = ()  # attributes that `forget` sets to None
    renewed: tuple[str, ...] = ()  # attributes that copies and pickles leave out, and `renew` sets
    beneath: bool = False  # a fused forward around it may do its work, and counts the fallbacks of both
    code: type[Code] = ClassCode  # of its parts, that it relies on
    example_rows: tuple[int, int] = (1, 2048)  # few and many of a call, see `example`
    pays = False  # it is known to, and not timed

    def __init__(self, module: nn.Module, path: str, kernels: Kernels, log: FallbackLog, **held: Any):
        """held: attributes that the subclass declares."""
        given = {"module": module, "path": path, "kernels": kernels, "log": log} | held
        self.__setstate__(given | {"kind": type(module), "guard": None, "stale": None})

    def __getstate__(self) -> dict[str, Any]:
        # A replaced function cannot be pickled; a copy only has to know that it was replaced.
        derived = ("function", "arguments", *self.renewed)
        state = {name: value for name, value in vars(self).items() if name not in derived}
        return state | {"stale": self.stale or self._another_class()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.function = self.kind.forward
        self.arguments = Arguments(self.function, type(self).fast)
        vars(self).setdefault("names", self.arguments.names)
        self.renew()

    def renew(self) -> None:
        """Sets the attributes that are named in `renewed`."""

    @property
    def owner(self) -> Any:
        return self.module

    @property
    def __code__(self) -> CodeType:
        """The stock function's, by whose file and line torch.export names inputs."""
        return type(self.module).forward.__code__

    def stock(self, *args: Any, **kwargs: Any) -> Any:
        if self.around is not None:
            return self.around(*args, **kwargs)
        # The compiler cannot look a method up on a class that diffusers allows in its graphs; it can call a function.
        if torch.compiler.is_compiling() and type(self.module) is self.kind:
            return self.function(self.module, *args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self.log.runs_stock_on_cpu(args, kwargs) or AS_WRITTEN.get():
            return self.stock(*args, **kwargs)
        reason = self.mode()
        if reason is None:
            with self.weights():
                reason = self._unfit(args, kwargs)
                if reason is None:
                    try:
                        return self.fast(*args, **kwargs)
                    except Exception as error:  # a call that stock may take, or refuses in words of its own
                        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
                        if STOCK in vars(error) or capturing:
                            raise  # who captures runs the call again without; what fails here would in stock too
                        told = f"the fast forward raised {reason_of(error)}"
                        reason = str(error) if isinstance(error, Unfit) else told
        if not self.beneath:
            self.log.fell_back(self.path, reason)
        return self.by_stock(*args, **kwargs)

    def by_stock(self, *args: Any, **kwargs: Any) -> Any:
        """What stock gives; its error is the caller's, and no reason to try again."""
        try:
            return self.stock(*args, **kwargs)
        except Exception as error:
            vars(error)[STOCK] = True
            raise

    def named(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        """The arguments of a call by their names."""
        return dict(zip(self.names, args, strict=False)) | kwargs

    def _refuses(self, args: tuple, kwargs: dict) -> str | None:
        """Why this call runs stock."""
        return self.mode() or self._unfit(args, kwargs)

    def weights(self) -> AbstractContextManager:
        """Inside, weights of its parts that are stored in fewer bits are cast to the dtype they are computed in."""
        return NOTHING if self.guard is None or not self.guard.casts else cast_up(self.guard.casts)

    def _unfit(self, args: tuple, kwargs: dict) -> str | None:
        if not self.arguments.take(args, kwargs):
            return "arguments the fast forward does not know"
        try:
            return self.unfit(*args, **kwargs)
        except Exception as error:  # of another kind than any it was made for
            return f"arguments that could not be examined: {reason_of(error)}"

    def forget(self) -> None:
        """Drops snapshots of the module, which refer to this forward; they are taken again when needed."""
        if self.guard is not None:
            self.guard.snapshot = None
        vars(self).update(dict.fromkeys(self.forgotten))
        for part in map(vars(self).get, ("inner", "prompts")):
            if part is not None and hasattr(part, "forget"):
                part.forget()

    def parts(self) -> Parts:
        """All whose work `fast` does itself, also the module; none if it only calls them."""
        return Parts()

    def joint(self) -> Iterable[Any]:
        """Modules that are computed at once for several forwards, this among them, when the first of these runs."""
        return ()

    def answered_layers(self) -> tuple:
        """Those inside that are called where they are of another class than matched; None for missing ones."""
        return self.parts().answered

    def remember(self) -> str | None:
        """Notes the module and its parts as they are now. Returns why they may not be fused."""
        parts = self.parts()
        self.guard = Guard(parts, self.code) if any(parts) else None
        return next(filter(None, (foreign(part) for part in chain(*parts) if part is not None)), None)

    def changed(self) -> str | None:
        """How the module differs from what was matched: its class, forward or parts. See `guard.py`."""
        if self.stale is not None:
            return self.stale
        if self.guard is not None:
            return self.guard.changed(self.module, self.parts)
        return self._another_class()

    def _another_class(self) -> str | None:
        kind = type(self.module)
        if kind is not self.kind:
            return changed_since(another_class(self.kind, kind))
        if kind.forward is not self.function:
            return changed_since(f"{kind.__name__}.forward")
        return None

    def mode(self) -> str | None:
        """Reasons that hold for every fused forward: changed code, training, gradients, autocast, hooks, transforms."""
        if (reason := self.changed()) is not None:
            return reason
        if self.module.training:
            return "training mode"
        if torch.is_grad_enabled():
            return "gradients are on (call it under torch.no_grad or torch.inference_mode)"
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            return "autocast is on"
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            if self.guard is not None and len(self.guard.records) > 1:
                return "global module hooks would not run inside"
        return transformation()

    def unfit(self, *args: Any, **kwargs: Any) -> str | None:
        return None

    @property
    def captures(self) -> bool:
        """Whether modules inside are replayed from CUDA graphs, so that their launches cost the host nothing."""
        inner = getattr(self, "inner", None)
        return getattr(self, "runner", None) is not None or (isinstance(inner, FastForward) and inner.captures)

    def example(self, rows: int, like: torch.Tensor) -> tuple | None:
        """Arguments of a call of so many rows like `like`, by which a lone site is timed; None if it is not."""
        return None

    @classmethod
    def taken(cls: type[Forward], module: nn.Module, *args: Any, **kwargs: Any) -> Forward | None:
        """The fast forward of this class that calling the module with these arguments would run; None if it would not.

        For callers that call a part of it instead, to fuse its last addition with the next operation.
        """
        forward = vars(module).get("forward")
        if type(forward) is not cls or forward.module is not module or hooked(module) or torch.compiler.is_compiling():
            return None
        return forward if forward._refuses(args, kwargs) is None else None

    @abstractmethod
    def fast(self, *args: Any, **kwargs: Any) -> Any:
        """The fused forward; arguments and result as the stock one."""
