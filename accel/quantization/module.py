"""A linear layer that holds its weight in fewer bits."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from accel_kernels import Quantized
from accel_kernels.device import card, free_memory
from accel_kernels.gemm.quantize_rows import KnownColumns
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from accel.parallel.sharded_layers import local
from accel.quantization.activations import (
    COLUMNS,
    FIXED,
    KERNELS,
    ORDER,
    SCALE,
    QuantizedCall,
    buffers_of,
    from_buffers,
    many_rows,
)
from accel.quantization.scheme import Scheme

SPARE = 8  # one in so many bytes of a GPU is not filled with what `state_dict` writes out
SAME = {"detach", "requires_grad_"}  # and the attribute `data`: the same memory, to be guarded in turn
WRITES = {"__setitem__", "__set__"}
COPIES = {"__deepcopy__", "__reduce_ex__"}
WHOLE = threading.RLock()  # held while another module holds its tensors: a second thread would see them freed


class ReadOnlyWeight(torch.Tensor):
    """A dequantized weight. Each access computes it anew, so a write into it would be lost, and raises."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: dict | None = None) -> Any:
        name, kwargs = function.__name__, kwargs or {}
        written = next(iter((*args, *kwargs.values())), None)
        inplace = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name in WRITES
        if isinstance(written, cls) and inplace and name not in SAME:
            raise RuntimeError(
                "the weight of a quantized linear cannot be changed, nor can adapters be merged into it; "
                "accel.restore(model) gives back the original weights"
            )
        with torch._C.DisableTorchFunctionSubclass():
            if name in COPIES:
                args = (args[0].as_subclass(torch.Tensor), *args[1:])
            result = function(*args, **kwargs)
            data = name == "__get__" and function.__self__ is torch.Tensor.data
            return result.as_subclass(cls) if data or name in SAME else result


class StockState(nn.Module):
    """A module whose state_dict is that of another, in whose place it is, where there is one.

    arrived: with `whole(self)`, a context in which the other module, as given, holds its tensors; or None.
    """

    arrived: Any = None

    def take(self) -> None:
        """Holds what the other does; called when it is whole. Raises ValueError for what cannot be held so."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.arrived is None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        with WHOLE, torch.inference_mode(False), torch.no_grad(), self.arrived.whole(self) as module:
            module.state_dict(destination=destination, prefix=prefix)
            for name, one in list(destination.items()):
                if name.startswith(prefix) and one.is_cuda and _short(one.device):
                    destination[name] = one.cpu()  # what is written out is a second copy

    def _load_from_state_dict(self, *args: Any) -> None:
        if self.arrived is None:
            super()._load_from_state_dict(*args)
            return
        try:
            with WHOLE, torch.inference_mode(False), torch.no_grad(), self.arrived.whole(self) as module:
                module._load_from_state_dict(*args)
                self.take()
        except ValueError as error:
            args[-1].append(f"{args[1]}: {error}; accel.restore(model) before, and optimize it again")


class QuantizedLinear(StockState, nn.Linear):
    """y = x W^T + b over a `Quantized` W; a subclass of nn.Linear, so that adapters can wrap it.

    The parts of W are buffers (`data`, `scales`, `zeros`): moved with the module, never cast, in the state_dict; float8
    as bytes, since torch does not pickle float8. dtype: of the weight before quantization, changed by `.to(dtype)`.
    `weight` is W dequantized to that dtype, a tensor that refuses writes. transposed: the original layer holds its
    weight (in, out). arrived: the `Repacked` that W was made of, whose state_dict it then has.

    Where the scheme says so, many input rows are rounded to 8 bits by `products`, if no gradient is needed. What
    calibration fixed are buffers too, or None: input_scale (1,) float32, and input_columns int64, which are never
    rounded; and so is input_order int32, the `order` of W.
    """

    data: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    values: dict[str | None, tuple]  # what is fixed, read once; nothing under None

    def __init__(
        self,
        quantized: Quantized,
        bias: nn.Parameter | None,
        dtype: torch.dtype,
        scheme: Scheme,
        transposed: bool = False,
        input_scale: torch.Tensor | None = None,
        input_columns: torch.Tensor | None = None,
    ):
        nn.Module.__init__(self)
        self.out_features, self.in_features = quantized.shape
        self.format = quantized.format
        for name, tensor in buffers_of(quantized).items():
            self.register_buffer(name, tensor)
        self.register_buffer(SCALE, input_scale)
        self.register_buffer(COLUMNS, input_columns)
        self.register_buffer(ORDER, quantized.order)
        self._fix()
        self.register_parameter("bias", bias)
        self.dtype, self.scheme, self.transposed = dtype, scheme, transposed
        self.exact_on = self.unrounded_on = None  # on which thread, see `dequantizing` and `unrounded`
        self.products = KERNELS

    @property
    def activations(self) -> str | None:
        """How many rows are rounded now."""
        return None if self.unrounded_on == threading.get_ident() else self.scheme.activations

    @property
    def exact(self) -> bool:
        """Whether no kernel multiplies now."""
        return self.exact_on == threading.get_ident()

    def rounds(self, x: torch.Tensor) -> str | None:
        """How the rows of x are rounded, None where they are not."""
        return self.activations if many_rows(x) else None

    @property
    def rounding(self) -> tuple[str | None, tuple | None, tuple | None]:
        """Equal for linears that can have one input rounded once: how, by what is fixed, in which order."""
        return self.activations, self.values.get(FIXED.get(self.activations)), self.order

    @property
    def order(self) -> tuple | None:
        """Equal for linears whose weights have the same `order`."""
        return self.values.get(ORDER)

    @property
    def fixed(self) -> torch.Tensor | KnownColumns | None:
        """What calibration fixed for the way in which rows are rounded now."""
        name = FIXED.get(self.activations)
        return self.columns if name == COLUMNS else None if name is None else self._buffers[name]

    @property
    def quantized(self) -> Quantized:
        return self.read(self.data, self.scales, self.zeros)

    def read(self, data: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> Quantized:
        """The weight that buffers like this module's are, its own or some rows of them."""
        return from_buffers(self.format, data, scales, zeros)._replace(order=self._buffers[ORDER])

    @property
    def call(self) -> QuantizedCall:
        """What it computes now, but for what calibration fixed."""
        return QuantizedCall(self.format, self.activations, self.products, self.exact)

    @property
    def weight(self) -> ReadOnlyWeight:  # type: ignore[override]
        return self.quantized.dequantized(self.dtype).as_subclass(ReadOnlyWeight)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name == "weight":  # tied to another's, as after embeddings got another size
            raise RuntimeError(
                "the weight of a quantized linear cannot be replaced by another, nor tied to it; do that before the "
                "model is quantized: accel.restore(model) gives back the original weights where they were kept"
            )
        super().register_parameter(name, param)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: (..., K). Gradients flow to it, and to the bias, not to W."""
        autocast = torch.is_autocast_enabled(input.device.type)
        if autocast or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return F.linear(input, self.quantized.dequantized(input.dtype), self.bias)
        if (order := self._buffers[ORDER]) is not None:
            input = input.index_select(-1, order)
        given, fixed = (input, self.data, self.scales, self.zeros, self.bias), self.fixed
        if has_torch_function_unary(input) and fixed is None:  # whoever watches sees one call
            return handle_torch_function(self.call, (input,), *given)  # type: ignore[arg-type]
        return self.call(*given, fixed)

    def _fix(self) -> None:
        # Read once: asking the device in every call would wait for it.
        found = {name: self._buffers[name] for name in (SCALE, COLUMNS)}
        held = {name: t for name, t in found.items() if t is not None and not t.is_meta}
        self.values = {name: tuple(t.tolist()) for name, t in held.items()}
        order = self._buffers[ORDER]
        if order is not None and not order.is_meta:
            self.values[ORDER] = (hashlib.sha256(order.cpu().numpy().tobytes()).digest(),)
        self.columns = KnownColumns.of(held[COLUMNS], self.in_features) if COLUMNS in held else None

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._fix()

    def take(self) -> None:
        found, scale, bias = self.arrived.read(), self.arrived.input_scale, self.arrived.bias(self.dtype)
        fixed = {} if scale is None else {SCALE: scale(self.arrived.module)}
        for name, new in (buffers_of(found) | {ORDER: found.order} | fixed).items():
            self._buffers[name] = overwritten(self._buffers[name], new)
        if self.bias is not None and self.bias is not bias:
            self.bias = bias
        self.scheme = replace(self.scheme, symmetric=found.zeros is None, ordered=found.order is not None)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "QuantizedLinear":
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.data.device)).dtype
        if self.columns is not None:
            self.columns = KnownColumns(*map(fn, self.columns))
        super()._apply(without_casting(self, fn), recurse)
        if self.arrived is not None:
            module = self.arrived.module
            before, _ = _dtypes(module), module._apply(fn)
            if _dtypes(module) != before:  # a library's scales are rounded by a cast
                with WHOLE, torch.inference_mode(False), torch.no_grad(), self.arrived.whole(self):
                    self.take()
        return self

    def extra_repr(self) -> str:
        scale = "".join(f", {SCALE}={value:.3g}" for value in self.values.get(SCALE, ()))
        columns = f", {COLUMNS}={list(self.values[COLUMNS])}" if COLUMNS in self.values else ""
        return f"{super().extra_repr()}, {self.scheme}{scale}{columns}"


def _short(device: torch.device) -> bool:
    return free_memory(device) * SPARE < card(device).memory


def _dtypes(module: nn.Module) -> list[torch.dtype]:
    return [tensor.dtype for tensor in (*module.parameters(), *module.buffers())]


def overwritten(held: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    """The new values, in the same memory where they fit in."""
    if held is None or new is None or (held.shape, held.dtype, held.device) != (new.shape, new.dtype, new.device):
        return new
    return held.copy_(new)


def row_tensors(linear: nn.Linear) -> tuple[torch.Tensor | None, ...]:
    """All tensors of a linear with a row for every output: weight and bias; of a quantized one its parts and the bias.

    Of one that is divided among ranks, this rank's part.
    """
    parameters, buffers = linear._parameters, linear._buffers  # at every product: attributes take ten times as long
    held = parameters.get("bias")
    bias = None if held is None else local(held)
    if type(linear) is QuantizedLinear:
        return buffers["data"], buffers["scales"], buffers["zeros"], bias
    weight = parameters["weight"]
    return None if weight is None else local(weight), bias


def without_casting(
    module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], *but: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    """fn for `_apply`, by which the module's own buffers, but for some, are moved and never cast to another dtype."""
    held = [tensor for name, tensor in module._buffers.items() if tensor is not None and name not in but]

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        result = fn(tensor)
        if result.dtype == tensor.dtype or not any(tensor is one for one in held):
            return result
        return tensor.to(result.device)

    return moved


def dequantizing(root: nn.Module) -> AbstractContextManager[None]:
    """Inside, on this thread, quantized linears multiply by torch with dequantized weights, and by no kernel."""
    return setting(root, exact_on=threading.get_ident())


def unrounded(root: nn.Module) -> AbstractContextManager[None]:
    """Inside, quantized linears leave all their inputs as they are, on this thread."""
    return setting(root, unrounded_on=threading.get_ident())


@contextmanager
def setting(root: nn.Module, **attributes: Any) -> Iterator[None]:
    """Inside, the quantized linears have these attributes."""
    before = [
        (module, {name: vars(module)[name] for name in attributes})
        for module in root.modules()
        if type(module) is QuantizedLinear
    ]
    try:
        for module, _ in before:
            vars(module).update(attributes)
        yield
    finally:
        for module, values in before:
            vars(module).update(values)
