"""Work in several threads at once."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch


def together(work: Callable, jobs: Iterable[tuple]) -> None:
    """Calls work(*job) for each job in a thread of its own. Raises what the first of them raises."""
    jobs = list(jobs)
    with ThreadPoolExecutor(len(jobs)) as threads:
        for ended in [threads.submit(work, *job) for job in jobs]:
            ended.result()


def meeting(model, meet, apart: bool = False) -> None:
    """The first layer's MLP calls `meet` whenever the main thread runs it; apart: on another thread."""

    def forward(self, *args):
        if threading.current_thread() is threading.main_thread():
            together(torch.no_grad()(meet), [()]) if apart else meet()
        return type(self).__base__.forward(self, *args)

    mlp = next(module for module in model.modules() if type(module).__name__.endswith("MLP"))
    mlp.__class__ = type("Meeting", (type(mlp),), {"forward": forward})
