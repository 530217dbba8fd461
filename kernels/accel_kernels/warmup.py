"""Compiling all kernels of a forward at once: a run in which launches only compile, in parallel.

One after the other, thirty kernels take half a minute. Results of a warmed-up forward are garbage and must be dropped.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import torch

from accel_kernels.compiling.kernel_hash import hash_callees_first
from accel_kernels.device import interpreted, triton_installed
from accel_kernels.errors import KernelRefused, of_compiler, set_aside

COMPILERS = "accel_kernels.compiling.compilers_triton"  # imported where Triton is needed

# Triton up to 3.6 loads each kernel's launcher as a Python extension of one and the same name. Python fills the module
# that has the name when it is loaded again, which may be one that another thread is about to read: of two threads that
# load launchers, one may get the other's, and launch with arguments taken for others. So there is one at a time.
_LOADING = threading.RLock()


REFUSED = "accel_refused"  # attribute of a kernel: the errors of what it was refused as, by `_way`

# This context's warmup; None outside of one.
_WARMUP: ContextVar["Warmup | None"] = ContextVar("accel_kernels_warmup", default=None)


def warming_up() -> bool:
    """Whether launches in this context only compile."""
    return _WARMUP.get() is not None


def alongside(work: Callable[[], object]) -> None:
    """In a warmup: runs work() in one of its threads, before it ends. What that gives or raises is dropped."""
    now = _WARMUP.get()
    if now is not None and now.threads is not None:
        now.threads.submit(work)


def prepare() -> None:
    """Begins, in the background, what goes before the first kernel is compiled or loaded.

    The start of what compiles, and a hash that Triton makes of its own files: a third of a second once a process, most
    of it outside the interpreter lock.
    """
    from triton.runtime import cache

    if not interpreted():
        import_module(COMPILERS).compilers_of(os.getpid()).start()
    key = getattr(cache, "triton_key", None)  # no documented name; without it the first kernel waits for the hash
    if key is not None:
        threading.Thread(target=key, name="accel-triton-key", daemon=True).start()


class Warmup:
    """Kernels that compile beside what this thread does: those that are launched in `launches`, until `wait`.

    They do on the device that is current in `launches`. Launches for another one compile for this one too: Triton would
    give both one kernel, and what is loaded into one device's context must not be launched on another. There it is read
    from Triton's cache at its first launch.
    In Triton's interpreter, and without Triton, it does nothing.
    """

    def __init__(self) -> None:
        self.compiled: list = []  # kernels so far
        self.device = -1  # that they are compiled for
        self.threads: ThreadPoolExecutor | None = None
        self._compiling: Any = None

    @contextmanager
    def launches(self) -> Iterator[None]:
        """Inside, once, Triton launches of this context compile instead of running."""
        if interpreted() or not triton_installed():
            yield
            return
        compiling = import_module(COMPILERS)
        compilers = compiling.compilers_of(os.getpid())
        self.device = _device()
        self.threads = ThreadPoolExecutor(compilers.most + 4)  # there is always one that waits to be compiled
        self._compiling = compiling.CompileBeside(self.threads, compilers)
        token = _WARMUP.set(self)
        try:
            with self._compiling.submitting():
                yield
        finally:
            _WARMUP.reset(token)

    def wait(self) -> None:
        """Returns when all are ready to launch. Raises what a compiler has raised."""
        if self.threads is None:
            return
        with self.threads as threads:
            self._compiling.wait()
            _load_all(self, threads)


@contextmanager
def warmup() -> Iterator[None]:
    """Inside, Triton launches of this context compile instead of running; leaves when all are ready, see `Warmup`."""
    kernels = Warmup()
    try:
        with kernels.launches():
            yield
    finally:
        kernels.wait()


def _load_all(now: Warmup, threads: ThreadPoolExecutor) -> None:
    kernels = []
    with _LOADING, torch.cuda.device(now.device):  # into whose context they are loaded
        for kernel in {id(one): one for one in now.compiled}.values():
            with refusals_aside():
                kernels.append(_ready(kernel))
        with refusals_aside():
            list(threads.map(_build_launcher, kernels))
        for kernel in kernels:
            with refusals_aside():
                kernel._init_handles()


@contextmanager
def refusals_aside() -> Iterator[None]:
    """Inside, a kernel that is refused is left: it is refused again where it is launched."""
    try:
        yield
    except Exception as error:
        if not of_compiler(error):
            raise
        set_aside(error)


def launch(kernel, grid: tuple, *args, **meta) -> None:
    """kernel[grid](*args, **meta), or its compilation where this context warms up.

    Triton launches on the current device, wherever the tensors are: on another one's stream a kernel would not wait for
    what makes its inputs. So the first tensor among the arguments decides.
    Raises KernelRefused where the compiler or the GPU refuses the kernel, which is not compiled again then.
    """
    hash_callees_first(kernel)
    now = _WARMUP.get()
    if now is None:
        _take_again(kernel, args, meta)
        try:
            with _there(args), _LOADING:
                kernel[grid](*args, **meta)
        except Exception as error:
            if not of_compiler(error):
                raise
            refused = vars(kernel)[REFUSED] = vars(kernel).get(REFUSED, {})
            refused[_way(args, meta)] = found = KernelRefused(kernel.__name__, error)
            raise found from error
    else:
        with torch.cuda.device(now.device):
            now.compiled.append(kernel.warmup(*args, grid=grid, **meta))


def _take_again(kernel, args: tuple, meta: dict) -> None:
    """Raises what the same kernel was refused with before."""
    refused = vars(kernel).get(REFUSED)
    if refused and (found := refused.get(_way(args, meta))) is not None:
        raise found.with_traceback(None)


def _way(args: tuple, meta: dict) -> tuple:
    """What a kernel is compiled for, about."""
    kinds = (getattr(one, "dtype", None) or type(one) for one in args)
    return (*kinds, *sorted((name, str(value)) for name, value in meta.items()))


def _there(args: tuple) -> AbstractContextManager:
    """Inside, the device of these arguments is the current one."""
    if torch.cuda.device_count() > 1:
        tensors = (getattr(one, "base", one) for one in args)  # of a tensor descriptor
        device = next((one.device for one in tensors if isinstance(one, torch.Tensor)), None)
        if device is not None and device.type == "cuda" and device.index != torch.cuda.current_device():
            return torch.cuda.device(device)
    return nullcontext()


def _device() -> int:
    """The number of the current one; -1, which is none, where CUDA is not in use."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else -1


def _ready(kernel):
    """The compiled kernel, of one that may be under way."""
    return kernel.result() if hasattr(kernel, "result") else kernel


def _build_launcher(kernel) -> None:
    """Compiles the host code that launches the kernel into Triton's cache, which otherwise the first launch does."""
    import triton

    triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
