"""The process that compiles kernels for another: it forks one for each, so that they compile side by side.

Run as a file, by `Compilers`. It has Triton and no PyTorch, whose import takes longer than most kernels: compiling
needs none of it, and the files of kernels use it only where they launch. Nothing in it runs on a GPU, and it has one
thread, so that forking is safe. What it compiles lies in Triton's cache.

In come pickles: `sys.path` and how many may compile at once, then a kernel each. Out goes a line for each that is done:
its number, and 1 or 0 for whether it compiled.
"""

import io
import os
import pickle
import selectors
import struct
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any, BinaryIO

LENGTH = struct.Struct("<Q")  # before every pickle
NOT_LAUNCHED = (OSError, RuntimeError, ImportError, AttributeError, AssertionError, subprocess.SubprocessError)
IDLE = 120.0  # seconds without work, after which it ends


def _absent(owner: Any, name: str) -> "type[_Absent]":
    """What stands for an attribute that is not there, from then on."""
    if name.startswith("__"):
        raise AttributeError(name)
    found = _Absent(name, (), {})
    setattr(owner, name, found)
    return found


class _Absent(type):
    """Stands for anything of PyTorch's that a file names when it is read: annotations, dtypes, decorators."""

    __getattr__ = _absent

    def __or__(cls, other: object) -> "type[_Absent]":
        return cls

    __ror__ = __getitem__ = __or__


class _Torch(ModuleType):
    """A module that is not imported."""

    __getattr__ = _absent


class Kernels(pickle.Unpickler):
    """Reads what to compile. Kernels come by the names of their modules and their own, or by what writes their text."""

    def persistent_load(self, name: tuple) -> Any:
        module, qualname, arguments = name
        found: Any = import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
        return found if arguments is None else found(*arguments)


def compile_kernel(job: bytes) -> None:
    """Into Triton's cache, with what launches it where that is compiled too. Raises what Triton's compiler raises."""
    import triton
    from triton.backends.nvidia import driver

    kind, kernel, signature, constants, attributes, target, options, more = Kernels(io.BytesIO(job)).load()
    import_module("accel_kernels.compiling.kernel_hash").hash_callees_first(kernel)
    source = kind(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=target, options=options, **more)
    if hasattr(driver, "make_launcher"):  # up to Triton 3.6 a C compiler makes one for each kernel
        with suppress(*NOT_LAUNCHED):  # without a GPU's library here; shows again where it is launched
            driver.CudaLauncher(source, compiled.metadata)


def import_without_torch(folder: str) -> None:
    """Imports Triton and what every kernel needs, and hashes Triton's own files once for all. folder: of kernels."""
    for name in ("torch", "torch.nn", "torch.nn.functional", "torch.distributed", "torch.nn.attention"):
        sys.modules[name] = _Torch(name)
    package = ModuleType("accel_kernels")  # none of its operations
    package.__path__ = [folder]
    sys.modules[package.__name__] = package
    for name in ("backends.nvidia.driver", "compiler.code_generator", "experimental.gluon"):
        import_module(f"triton.{name}")
    getattr(import_module("triton.runtime.cache"), "triton_key", lambda: None)()


class Server:
    """Forks for one kernel after another. most: how many at once."""

    def __init__(self, source: BinaryIO, answers: BinaryIO, most: int):
        self.source, self.answers, self.most = source, answers, most
        self.waiting: list[tuple[int, bytes]] = []
        self.running: dict[int, tuple[int, int]] = {}  # by the descriptor that a process keeps open: its id, its kernel
        self.selector = selectors.DefaultSelector()
        self.selector.register(source, selectors.EVENT_READ)
        self.count = 0

    def run(self) -> None:
        """Until its user ends or closes the pipe, or nothing comes for long."""
        while events := self.selector.select(None if self.running else IDLE):
            for key, _ in events:
                if key.fileobj is not self.source:
                    self._ended(key.fd)
                    continue
                job = read(self.source)
                if job is None:
                    return
                self.waiting.append((self.count, job))
                self.count += 1
            while self.waiting and len(self.running) < self.most:
                self._fork(*self.waiting.pop(0))

    def _fork(self, number: int, job: bytes) -> None:
        try:
            Kernels(io.BytesIO(job)).load()  # imports, for the processes after this one too
        except Exception as error:
            self.set_aside(error)
            self._answer(number, False)
            return
        ours, theirs = os.pipe()
        process = os.fork()
        if not process:
            code = 1
            try:
                compile_kernel(job)
                code = 0
            finally:
                os._exit(code)  # nothing of this process runs in that one
        os.close(theirs)
        self.running[ours] = process, number
        self.selector.register(ours, selectors.EVENT_READ)

    def set_aside(self, error: Exception) -> None:
        """The kernel is compiled where it is launched, and what is wrong with it shows there."""
        print(error, file=sys.stderr)

    def _ended(self, pipe: int) -> None:
        process, number = self.running.pop(pipe)
        self.selector.unregister(pipe)
        os.close(pipe)
        self._answer(number, os.waitpid(process, 0)[1] == 0)

    def _answer(self, number: int, well: bool) -> None:
        self.answers.write(b"%d %d\n" % (number, well))
        self.answers.flush()


def read(source: BinaryIO) -> bytes | None:
    """The next pickle; None where there is no more."""
    head = _exactly(source, LENGTH.size)
    return None if head is None else _exactly(source, LENGTH.unpack(head)[0])


def _exactly(source: BinaryIO, size: int) -> bytes | None:
    """So many bytes, which may come in parts: what is buffered no `select` would tell of."""
    found = b""
    while len(found) < size:
        part = source.read(size - len(found))
        if not part:
            return None
        found += part
    return found


def main() -> None:
    source, answers = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    first = read(source)
    if first is not None:
        sys.path[:], most = pickle.loads(first)
        import_without_torch(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        Server(source, answers, most).run()


if __name__ == "__main__":
    main()
