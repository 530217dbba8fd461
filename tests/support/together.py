"""Work in several threads at once."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor


def together(work: Callable, jobs: Iterable[tuple]) -> None:
    """Calls work(*job) for each job in a thread of its own. Raises what the first of them raises."""
    jobs = list(jobs)
    with ThreadPoolExecutor(len(jobs)) as threads:
        for ended in [threads.submit(work, *job) for job in jobs]:
            ended.result()
