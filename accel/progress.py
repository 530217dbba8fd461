"""A bar for work that takes minutes, on the error stream: what a program prints stays its own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """Inside, call what it gives with how much is done and how much there is."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, whole: progress.update(task, completed=done, total=whole)
