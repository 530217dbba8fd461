"""A GPU that is not there: tensors that say they lie on it, and launches that are kept and can be compiled.

So tests see what launchers choose for a GPU, and what the compiler makes of it. To be imported without Triton's
interpreter: by a script that `in_a_process` runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from accel_kernels.device import Card, replayed
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from support.kernels.cards import made_up

GPU, NOWHERE = torch.device("cuda", 0), torch.device("meta")
compile_only = JITFunction.run
device_of, lies_on_gpu = torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__


class Launch(NamedTuple):
    """What a launcher launched."""

    kernel: JITFunction
    grid: tuple
    args: tuple
    meta: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def way(self) -> tuple:
        """What its constants are, among them which arguments are absent: mostly one for each machine code."""
        constants = sorted((name, str(value)) for name, value in self.meta.items())
        return self.name, tuple(arg is None for arg in self.args), *constants

    def compiled(self):
        """Triton's compiled kernel. Raises what the compiler raises."""
        return compile_only(self.kernel, *self.args, grid=self.grid, warmup=True, **self.meta)


class _Driver:
    """Of a GPU of this compute capability; the number of the device, by which Triton remembers kernels, is the same."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


class _Tensors(TorchFunctionMode):
    """Tensors of the GPU have a shape and nothing in it; random ones too, since nobody looks."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function == device_of:
            return GPU if device_of(*args) == NOWHERE else device_of(*args)
        if function == lies_on_gpu:
            return device_of(*args) == NOWHERE
        if function in (torch.randn, torch.rand):
            kwargs = {name: value for name, value in kwargs.items() if name != "generator"} | {"device": GPU}
        return function(*map(nowhere, args), **{name: nowhere(one) for name, one in kwargs.items()})


def nowhere(value):
    return NOWHERE if isinstance(value, torch.device) and value == GPU else value  # to compare a tensor takes long


def is_argument(value) -> bool:
    """Whether Triton takes this as a kernel's argument or setting; the fields of a tuple are asked one by one."""
    if isinstance(value, tuple):
        return all(map(is_argument, value))
    kinds = (torch.Tensor, torch.dtype, int, float, str)
    return value is None or isinstance(value, kinds) or type(value).__module__.startswith("triton.")


@contextmanager
def absent_gpu(card: int | Card) -> Iterator[list[Launch]]:
    """Inside, tensors can be made on GPU, and launches of kernels are added to the list. card: or a generation, 90."""
    card = made_up(card) if isinstance(card, int) else card
    launches: list[Launch] = []

    def keep(kernel, *args, grid, warmup, **meta):
        assert all(map(is_argument, (*args, *meta.values()))), f"{kernel.__name__} is given what Triton cannot take"
        launches.append(Launch(kernel, grid, args, meta))

    major, minor = card.compute
    triton.runtime.driver.set_active(_Driver(10 * major + minor))
    unchecked = mock.patch("accel_kernels.op.needs_check", lambda device: False)
    with replayed(card), unchecked, mock.patch.object(JITFunction, "run", keep), _Tensors():
        yield launches
