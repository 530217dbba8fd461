"""Signs of work that takes a while: bars on a terminal, a line a stage on the error stream where there is none."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def as_text(shown: Any) -> str:
    """What a terminal would show of it, without colors."""
    console = Console(width=120, no_color=True)
    with console.capture() as captured:
        console.print(shown)
    return captured.get()


class Stages(Progress):
    """A bar that is gone when all is done, on a terminal. Elsewhere each new description of a task is a line on the
    error stream, at once: what a program prints stays its own."""

    def __init__(self, *columns: ProgressColumn, console: Console):
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.last = ""

    def add_task(self, description: str, *args: Any, **kwargs: Any) -> TaskID:
        self._tell(description)
        return super().add_task(description, *args, **kwargs)

    def update(self, task_id: TaskID, *, description: str | None = None, **kwargs: Any) -> None:
        self._tell(description)
        super().update(task_id, description=description, **kwargs)

    def _tell(self, stage: str | None) -> None:
        if self.disable and stage and stage != self.last:
            print(stage, file=sys.stderr, flush=True)
            self.last = stage


def progress_bar(console: Console) -> Stages:
    """Of a command, on the console that it prints its results to."""
    return Stages(SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console)


@contextmanager
def bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """On the error stream; inside, call what it gives with how much is done and how much there is."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Stages(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("" if console.is_terminal else description, total=None)

        def at(done: int, whole: int) -> None:
            told = description if console.is_terminal else f"{description}: {done} of {whole}"
            progress.update(task, description=told, completed=done, total=whole)

        yield at
