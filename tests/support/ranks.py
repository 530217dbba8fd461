"""Pools of processes that are ranks of one group, and faults among them."""

import gc
import multiprocessing
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

TIMEOUT = 150.0  # seconds after which a rank is thought to hang
# After which a collective without its partners fails; of GPUs, where the others may be compiling kernels, later.
COLLECTIVE, COLLECTIVE_OF_GPUS = timedelta(seconds=60), timedelta(seconds=120)

STARTING = timedelta(seconds=60)  # for all processes to be there, on a busy machine


class RankFailed(AssertionError):
    """What a rank raised, with its traceback."""


def _serve(rank: int, size: int, port: int, backend: str, limit: timedelta, tasks: Any, answers: Any) -> None:
    import torch
    import torch.distributed as dist

    gc.freeze()  # what was imported before the fork; to look through it would copy all its pages, for each process
    gc.set_threshold(100_000)  # as in tests/conftest.py
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))  # as torchrun does
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout=max(limit, STARTING))
    store.set(f"started/{rank}", "")
    store.wait([f"started/{one}" for one in range(size)])
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    while (task := tasks.get()) is not None:
        number, function, args = task
        try:
            answers.put((number, rank, function(*args), None))
        except BaseException as error:
            told = f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"
            answers.put((number, rank, None, told))
    dist.destroy_process_group()


class RankPool:
    """`size` processes of one group, of gloo on the CPU or of nccl, a GPU each. `run` calls a function of a module on
    all of them at once.

    They are forked from a process that has imported the libraries once, so that starting them costs little.
    limit: after which a collective without its partners fails.
    """

    def __init__(self, size: int, backend: str = "gloo", limit: timedelta | None = None):
        limit = limit or (COLLECTIVE_OF_GPUS if backend == "nccl" else COLLECTIVE)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            [
                "torch.distributed.tensor",
                "transformers.models.auto.modeling_auto",
                "transformers.models.llama.modeling_llama",
                "accel.api",
                "accel.report",
                "accel.encoders.rule",
                "accel.seq2seq.rule",
                "accel.llm.family",
                "accel.llm.stages",
                "accel.llm.ptq.formats.prequantized_import",
                "accel.diffusion.pipeline",
                "accel.diffusion.schedulers",
                "accel.diffusion.stages",
                "accel.verification.verify",
                "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
                "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
            ]
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.size, self.number = size, 0
        self.tasks = [context.Queue() for _ in range(size)]
        self.answers = context.Queue()
        self.processes = [
            context.Process(
                target=_serve, args=(rank, size, port, backend, limit, self.tasks[rank], self.answers), daemon=True
            )
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def run(self, function: Callable, *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """What function(*args) gave on each rank. Raises RankFailed with what they raised, or that one hangs."""
        self.number += 1
        for tasks in self.tasks:
            tasks.put((self.number, function, args))
        found: dict[int, Any] = {}
        failed: list[str] = []
        end = time.monotonic() + timeout
        while len(found) < self.size:
            try:
                number, rank, value, error = self.answers.get(timeout=1.0)
            except queue.Empty:
                missing = {rank: self.processes[rank].exitcode for rank in range(self.size) if rank not in found}
                if time.monotonic() < end and set(missing.values()) == {None}:
                    continue
                self.close()
                what = f"no answer in {timeout} s, or an exit code: ranks {missing}"
                raise RankFailed("; ".join((what, *failed))) from None
            if number == self.number:
                found[rank] = value
                failed += [] if error is None else [error]
        if failed:
            raise RankFailed("\n".join(failed))
        return [found[rank] for rank in range(self.size)]

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        for process, tasks in zip(self.processes, self.tasks, strict=True):
            tasks.put(None)
            process.join(timeout=1)
            if process.is_alive():
                process.kill()
                process.join()


LIMIT = timedelta(seconds=7)
HANGS = 150.0  # seconds; the machine may be busy


class FaultyRanks(RankPool):
    """A pool for one task, after which it is closed."""

    def __init__(self, size: int = 2):
        super().__init__(size, limit=LIMIT)

    def outcomes(self, function: Callable, *args: Any) -> list[Any]:
        """What function(*args) gave on each rank; the exit code of one that has ended without an answer."""
        for tasks in self.tasks:
            tasks.put((1, function, args))
        found: dict[int, Any] = {}
        end = time.monotonic() + HANGS
        while len(found) < self.size:
            assert time.monotonic() < end, f"only {found} after {HANGS} s"
            try:
                _, rank, value, error = self.answers.get(timeout=0.2)
                found[rank] = value if error is None else error
            except queue.Empty:
                for rank, process in enumerate(self.processes):
                    if not process.is_alive() and rank not in found:
                        found[rank] = process.exitcode
        return [found[rank] for rank in range(self.size)]

    def exit_codes(self) -> list[int | None]:
        """How each has ended by itself, once told to; None where it had to be killed."""
        for tasks in self.tasks:
            tasks.put(None)
        for process in self.processes:
            process.join(timeout=HANGS)
        codes = [process.exitcode for process in self.processes]
        self.close()
        return codes
