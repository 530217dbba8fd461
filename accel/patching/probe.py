"""Runs a module's stock forward against a fused candidate, on small random inputs.

Structure says which formula a block should compute; the probe confirms it. It runs none of the user's code, changes no
weights, and draws from a generator of its own.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from accel_kernels.attention.math_attention import math_attention
from accel_kernels.warmup import warmup
from torch import nn
from torch.utils import _pytree as pytree

from accel.casting import cast_up, casts_of
from accel.comparison import relative_max
from accel.errors import reason_of
from accel.in_flight import alone
from accel.patching.structure import meta_weights, placement, side_effects
from accel.tolerances import BLOCK, BLOCK_WIDENED, Bounds, bound

UNEXAMINED = "could not be examined"
NARROW = (torch.float16, torch.bfloat16)
Answer = TypeVar("Answer")
MOST_WIDENED = 1 << 26  # numbers of a module that is tried in float32 too: a block, no stack of experts


class Probe:
    """Compares candidates with stock; remembers the verdict per kind, since blocks of one kind come in dozens."""

    def __init__(self) -> None:
        self.verdicts: dict[tuple, str | None] = {}
        self.answers: dict[tuple, Any] = {}

    def once(self, module: nn.Module, variant: object, find: Callable[[], Answer]) -> Answer:
        """What find(), which asks of many candidates, gives of the module, or gave of another of its kind."""
        if side_effects(module) is not None:
            return find()
        key = (*_kind(module), variant)
        if key not in self.answers:
            self.answers[key] = find()
        return self.answers[key]

    def disagreement(
        self,
        module: nn.Module,
        candidate: Callable,
        args: tuple | Callable[[], tuple],
        kwargs: dict | None = None,
        variant: object = None,
        ahead: bool = False,
    ) -> str | None:
        """None where candidate(*args) equals the module's stock forward, else how far they are apart.

        args: or a function that makes them, called if the verdict is not known yet. variant: tells apart candidates of
        one class for one kind of module. ahead: the candidate's kernels are compiled in parallel first.
        """
        reason = "weights are not loaded (meta device)" if meta_weights(module) else side_effects(module)
        if reason is not None:
            return reason
        key = (*_kind(module), type(getattr(candidate, "__self__", candidate)), variant)
        if key not in self.verdicts:
            given = args() if callable(args) else args, kwargs or {}
            if ahead:
                compile_ahead(partial(candidate, *given[0], **given[1]), placement(module)[0])
            with alone(module), cast_up(casts_of(module.modules())), math_attention():
                own = _compare(module, candidate, *given, BLOCK)
                self.verdicts[key] = own or _compare_widened(module, candidate, *given)
        return self.verdicts[key]

    def unlike(
        self, forward: Any, args: tuple | Callable[[], tuple], kwargs: dict | None = None, variant: object = None
    ) -> str | None:
        """`disagreement` of a fast forward, with plain kernels in place of its own."""
        candidate = copy.copy(forward)
        candidate.kernels = forward.kernels.plain()
        return self.disagreement(forward.module, candidate.fast, args, kwargs, variant)


def example(module: nn.Module, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random input of the module's device and dtype, from a generator of its own."""
    device, dtype = placement(module)
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(device, dtype)


def compile_ahead(candidate: Callable[[], object], device: torch.device) -> None:
    """Compiles what candidate() launches on a GPU, side by side; what it gives is dropped."""
    if device.type == "cuda":
        try:
            with torch.no_grad(), warmup():
                candidate()
        except Exception as error:  # shows again where it runs
            reason_of(error)


def _kind(module: nn.Module) -> tuple:
    """Everything that can change the formula, but not sizes."""
    settings = tuple(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, bool | str | float) and name != "training"
    )
    children = tuple((name, type(child)) for name, child in module.named_modules())
    tensors = tuple((name, tensor.dtype) for name, tensor in module.named_parameters())
    processor = type(getattr(module, "processor", None))
    return type(module), settings, children, tensors, processor


def _compare_widened(module: nn.Module, candidate: Callable, args: tuple, kwargs: dict) -> str | None:
    """Compares a module in 16 bits once more in float32: rounding may hide that one activation is taken for another."""
    held = [*module.parameters(), *module.buffers()]
    numbers = sum(tensor.numel() for tensor in held if tensor.dtype in NARROW)
    plain = all(type(tensor) in (torch.Tensor, nn.Parameter) and tensor.is_floating_point() for tensor in held)
    if not 0 < numbers <= MOST_WIDENED or not plain:
        return None
    args, kwargs = (pytree.tree_map_only(torch.Tensor, _wide, given) for given in (args, kwargs))
    with _widened(module):
        reason = _compare(module, candidate, args, kwargs, BLOCK_WIDENED)
    return None if reason is None or reason.startswith(UNEXAMINED) else reason


@contextmanager
def _widened(module: nn.Module) -> Iterator[None]:
    """Other tensors in the places of the module's own, which stay untouched."""
    before: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for child in module.modules():
        for held in (vars(child)["_parameters"], vars(child)["_buffers"]):
            before += [(held, name, tensor) for name, tensor in held.items() if tensor is not None]
    try:
        for held, name, tensor in before:
            wide = _wide(tensor.detach())
            held[name] = nn.Parameter(wide, requires_grad=False) if isinstance(tensor, nn.Parameter) else wide
        yield
    finally:
        for held, name, tensor in before:
            held[name] = tensor


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in NARROW else tensor


def _compare(module: nn.Module, candidate: Callable, args: tuple, kwargs: dict, bounds: Bounds) -> str | None:
    training = [(child, child.training) for child in module.modules()]
    try:
        for child, _ in training:
            child.training = False
        with torch.no_grad():
            wanted = type(module).forward(module, *args, **kwargs)
            got = candidate(*args, **kwargs)
    except Exception as error:  # a block that cannot run this call is not the block we know
        return f"{UNEXAMINED}: {reason_of(error)}"
    finally:
        for child, flag in training:
            child.training = flag
    wanted, got = (_first(output) for output in (wanted, got))
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        return f"gives {tuple(wanted.shape)} {wanted.dtype}, not {tuple(got.shape)} {got.dtype}"
    off = relative_max(got, wanted)
    if not off <= bound(bounds, wanted.dtype):
        return f"computes something else: off by {off:.1e} of the largest output"
    return None


def _first(output: Any) -> torch.Tensor:
    while not isinstance(output, torch.Tensor):
        output = output[0]
    return output
