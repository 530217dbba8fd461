"""What an operation is here: a plain-torch reference, a Triton kernel, and what the kernel supports."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from accel_kernels.device import Feature, lacks
from accel_kernels.errors import KernelRefused
from accel_kernels.self_check import KernelOutcomes, needs_check, tensors
from accel_kernels.warmup import warming_up


@dataclass(frozen=True)
class Case:
    """One shape that tests and benchmarks run: `make(device, dtype)` gives the arguments of a call."""

    name: str
    make: Callable[[torch.device, torch.dtype], tuple[tuple, dict]]
    small: bool = False  # few enough programs for Triton's interpreter


class Random:
    """Random tensors on one device, of one dtype where no other is named: the same ones in the same order."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator("cpu").manual_seed(0)

    def __call__(
        self, *size: int, spread: float = 1.0, mean: float = 0.0, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Normally distributed."""
        x = torch.randn(*size, generator=self.generator, device="cpu")
        return (x * spread + mean).to(self.device, dtype or self.dtype)

    def uniform(self, *size: int) -> torch.Tensor:
        """Of 0 to 1, in float32."""
        return torch.rand(*size, generator=self.generator, device="cpu").to(self.device)


def random_cases(make: Callable[..., tuple[tuple, dict]], kind: type[Random] = Random) -> Callable[..., Case]:
    """A function of a name, of arguments, and of `small` that gives the case whose call is make(random, *arguments)."""

    def case(name: str, *args: Any, small: bool = False, **more: Any) -> Case:
        return Case(name, lambda device, dtype: make(kind(device, dtype), *args, **more), small)

    return case


def _by_name(name: str) -> "Op":
    return getattr(importlib.import_module("accel_kernels"), name)


def launcher(kernel: str) -> Callable[..., Any]:
    """The function of "module:function", imported when used; one that raises KernelRefused without triton."""
    module, function = kernel.split(":")
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return partial(_refuse, KernelRefused(function, error))


def _refuse(refused: KernelRefused, *args: Any, **kwargs: Any) -> Any:
    raise refused.with_traceback(None)


@dataclass(frozen=True)
class Op:
    """A callable operation: Triton kernel where it is supported, `reference` elsewhere.

    Its first argument says where it runs: a tensor, or several that are one operand, such as a quantized weight.

    reference: plain torch; the fallback and the oracle of the tests.
    kernel:    "module:function" of the Triton launcher, imported at its first use, same arguments as `reference`.
    supports:  same arguments; None, or the reason why the Triton kernel cannot take this call.
    pays:      same arguments; whether the kernel is worth it where it could run. Without it, always.
    instead:   same arguments and result; what runs on CUDA where the kernel does not. Without it, `reference`.
    on_cpu:    same arguments and result; what runs on a CPU. Without it, `reference`.
    changes:   whether it changes what it is given in a way that it must not do twice, as states of sequences.
    """

    name: str
    reference: Callable[..., Any]
    kernel: str
    supports: Callable[..., str | None]
    cases: tuple[Case, ...] = ()
    pays: Callable[..., bool] | None = None
    instead: Callable[..., Any] | None = None
    on_cpu: Callable[..., Any] | None = None
    changes: bool = False

    @cached_property
    def outcomes(self) -> KernelOutcomes:
        return KernelOutcomes(self.reference, self.changes)

    @cached_property
    def triton(self) -> Callable[..., Any]:
        return launcher(self.kernel)

    def __reduce__(self):
        return _by_name, (self.name,)  # copies and pickles refer to the one op

    def __call__(self, x: Any, *args, **kwargs):
        if not x.is_cuda:
            return (self.on_cpu or self.reference)(x, *args, **kwargs)
        return self._on_gpu(x, *args, **kwargs)

    def _on_gpu(self, x: Any, *args, **kwargs):
        other = self.instead or self.reference
        if self.supports(x, *args, **kwargs) is not None:
            return other(x, *args, **kwargs)
        pays = self.pays is None or self.pays(x, *args, **kwargs)
        if self.pays is not None and warming_up():  # what another size will take
            (other if pays else self.triton)(x, *args, **kwargs)
        return self.guarded(self.triton if pays else other, x, *args, **kwargs)

    def guarded(self, kernel: Callable[..., Any], x: Any, *args, **kwargs):
        """kernel(x, *args, **kwargs), or what takes its place where the GPU refuses it or it computes something else.

        kernel: `triton`, `instead`, or one of them with settings.
        """
        device = x.device if isinstance(x, torch.Tensor) else next(tensors(x)).device
        run = self.outcomes.run_checked if needs_check(device) and not warming_up() else self.outcomes.run
        return run(kernel, self.instead or self.reference, x, *args, **kwargs)


def make_op(
    name: str, reference: Callable[..., Any], supports: Callable[..., str | None], cases: tuple[Case, ...], **more: Any
) -> Op:
    """The operation whose launcher has its name, in the file of its reference with `_triton` behind its name."""
    return Op(name, reference, f"{reference.__module__}_triton:{name}", supports, cases, **more)


FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def dtype_reason(*tensors: torch.Tensor | None, products: bool = False) -> str | None:
    """Why these tensors cannot share a kernel: a dtype that is not fp16, bf16 or fp32, or several devices.

    products: whether it lives on tensor cores, without which Triton multiplies far slower than torch does.
    """
    given = [t for t in tensors if t is not None]
    for tensor in given:
        if tensor.dtype not in FLOATS:
            return f"dtype {tensor.dtype} is not float16, bfloat16 or float32"
        if tensor.device != given[0].device:
            return f"tensors on {given[0].device} and {tensor.device}"
    if given and given[0].is_cuda:
        needed = [Feature.BFLOAT16] if any(tensor.dtype == torch.bfloat16 for tensor in given) else [Feature.TRITON]
        return lacks(given[0].device, *needed, *([Feature.WIDE_PRODUCTS] if products else []))
    return None


def contiguous_reason(**tensors: torch.Tensor | None) -> str | None:
    """Which of these, that are there, is not contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            return f"{name} not contiguous"
    return None


def rows_reason(x: torch.Tensor, residual: torch.Tensor | None) -> str | None:
    """Why a norm cannot hold whole rows of x, with a residual added, in registers."""
    if x.numel() == 0:
        return "empty"
    if x.shape[-1] > 16384:
        return f"{x.shape[-1]} channels, more than 16384"
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        return "residual of another shape or dtype"
    return contiguous_reason(x=x, residual=residual)
