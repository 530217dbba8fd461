"""Kernels compiled in other processes, several at once: threads of one would take turns under Python's lock.

They leave what they compile in Triton's cache. Whatever fails there, or cannot be sent there, is compiled here.
"""

import atexit
import hashlib
import inspect
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as TooLong
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

from triton import AsyncCompileMode
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from accel_kernels.compiling import compiler_process
from accel_kernels.errors import set_aside

try:
    from triton.runtime._async_compile import active_mode
except ImportError:  # a Triton that keeps it elsewhere: the run waits where its launches end
    active_mode = None

MOST = 32  # processes
PATIENCE = 30.0  # seconds without any answer, after which nothing more is expected from there


class CompileBeside(AsyncCompileMode):
    """Triton's asynchronous compilation, in which threads of the executor wait for other processes to compile."""

    def __init__(self, executor: Executor, compilers: "Compilers"):
        # A kernel that does not compile says so later: raised here, it would leave Triton 3.6 with these threads.
        super().__init__(executor, ignore_errors=True)
        self.compilers = compilers

    @contextmanager
    def submitting(self) -> Iterator[None]:
        """Inside, kernels of this context are compiled this way; leaves at once."""
        self.__enter__()
        try:
            yield
        finally:
            if active_mode is None:
                self.__exit__(None, None, None)
            else:
                active_mode.set(None)

    def wait(self) -> None:
        """Until all of them are compiled."""
        self.__exit__(None, None, None)

    def submit(self, key: str, compile_fn: Callable, *more: Any) -> Any:
        return super().submit(key, partial(self._compile, key, compile_fn), *more)

    def _compile(self, key: str, compile_fn: Callable) -> Any:
        try:
            given = inspect.getclosurevars(compile_fn).nonlocals
            if not _cached(key, given["src"].name):
                self.compilers.compile(pickled(**given))
        except Exception as error:  # a Triton that is made in another way, or what cannot be sent
            set_aside(error)
        return compile_fn()


def _cached(key: str, name: str) -> bool:
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return bool(manager.get_group(f"{name[:150]}.json"))


def pickled(src: Any, target: Any, options: Any, env_vars: dict, **_: Any) -> bytes:
    """All that decides what `triton.compile` makes and how it is cached. Raises what pickle does."""
    kernel = src.fn, src.signature, src.constants, src.attrs
    job = io.BytesIO()
    _Names(job).dump((type(src), *kernel, target, options.__dict__, {"_env_vars": env_vars}))
    return job.getvalue()


class _Names(pickle.Pickler):
    """Writes kernels by the names of their modules and their own, or of what writes their text."""

    def persistent_id(self, one: Any) -> tuple | None:
        if not isinstance(one, JITFunction):
            return None
        return getattr(one, "written_by", (one.fn.__module__, one.fn.__qualname__, None))


class Compilers:
    """A process that forks one for each kernel. most: how many at once. command: how it is started."""

    def __init__(self, most: int, command: list[str] | None = None, patience: float = PATIENCE):
        self.most, self.patience = most, patience
        self.command = command or [sys.executable, "-I", compiler_process.__file__]
        self.compiled = 0
        self._broken = most < 2
        self._process: subprocess.Popen | None = None
        self._waiting: dict[int, Future] = {}
        self._count = 0
        self._heard = 0.0
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts it, if it does not run, and waits for nothing."""
        with self._lock:
            self._start()

    def compile(self, job: bytes) -> bool:
        """Whether another process has compiled it; it waits for that."""
        future: Future = Future()
        with self._lock:
            process = self._start()
            if process is None:
                return False
            self._waiting[self._count] = future
            self._count += 1
            try:
                _send(process, job)
            except OSError:  # it has ended; what reads its answers ends this job too
                return False
        while True:
            try:
                return future.result(self.patience)
            except TooLong:
                if time.monotonic() - self._heard > self.patience:
                    self.close()
                    return False

    def close(self) -> None:
        """Ends it, with all that it runs, for good. Takes no lock: a thread that hangs in writing to it may hold it."""
        self._broken = True
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _start(self) -> subprocess.Popen | None:
        process = self._process
        if process is not None and process.poll() is not None and not self._broken:
            self._broken = process.returncode != 0  # else it had nothing to do for long
            process = None
        if process is None and not self._broken:
            pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
            try:
                process = subprocess.Popen(
                    self.command, stdin=pipe, stdout=pipe, stderr=quiet, bufsize=0, start_new_session=True
                )
                self._process, self._waiting, self._count, self._heard = process, {}, 0, time.monotonic()
                _send(process, pickle.dumps((sys.path, self.most)))
            except OSError as error:  # no such program, or too many processes
                set_aside(error)
                self._broken = True
                return None
            atexit.register(self.close)
            threading.Thread(
                target=self._listen, args=(process, self._waiting), name="accel-compilers", daemon=True
            ).start()
        return None if self._broken else process

    def _listen(self, process: subprocess.Popen, waiting: dict[int, Future]) -> None:
        """Takes answers until there are no more; what is left then was not compiled."""
        for line in process.stdout or ():
            number, well = map(int, line.split())
            self._heard = time.monotonic()
            self.compiled += well
            waiting.pop(number).set_result(bool(well))
        process.wait()
        with self._lock:
            for future in waiting.values():
                future.set_result(False)
            waiting.clear()


def _send(process: subprocess.Popen, body: bytes) -> None:
    assert process.stdin is not None
    left = memoryview(compiler_process.LENGTH.pack(len(body)) + body)
    while left:
        left = left[process.stdin.write(left) :]


@lru_cache(maxsize=1)
def compilers_of(process: int) -> Compilers:
    """This process's, whose id is given: a forked one must not speak through the pipes of another."""
    return Compilers(min(MOST, len(os.sched_getaffinity(process))) if hasattr(os, "fork") else 1)
