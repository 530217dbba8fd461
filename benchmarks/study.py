"""What all studies share: where they run, and the file that one fills as it goes."""

import json
import math
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from accel.bench.machine import provenance
from accel.bench.results import BenchRecord, write
from accel.bench.timing import burst

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOY = DEVICE.type == "cpu"  # tiny sizes, and Triton's interpreter: to try a study out
HALF = torch.float32 if TOY else torch.bfloat16  # what models run in
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


class Study(BenchRecord):
    """A record that is printed row by row and lies in a file from its first row on; of several ranks, by the first.

    body: its parts, such as `rows=[]`.
    """

    def __init__(self, case: str, out: Path | None, about: str = "", seconds: float = math.inf, dtype=HALF, **body):
        super().__init__({"case": case, "about": about} | provenance(DEVICE, dtype), body, seconds, self._write)
        self.out, self.first = out, os.environ.get("RANK", "0") == "0"

    def _write(self, result: dict) -> None:
        if self.out is not None and self.first:
            write(result, self.out, indent=1)

    def add(self, part: str, row: dict) -> None:
        super().add(part, row)
        self.show(row)

    def keep_rows(self, found: dict) -> None:
        """More of the body, shown and written."""
        self.body |= found
        self.save()
        self.show(found)

    def show(self, *values: object) -> None:
        if self.first:
            print(*(json.dumps(one, default=str) if isinstance(one, dict) else one for one in values), flush=True)

    @contextmanager
    def attempt(self, **where: object) -> Iterator[None]:
        """An error inside is a line of `failed`, and what comes behind goes on."""
        try:
            yield
        except Exception as error:
            self.fail(error, **where)
            self.show("failed:", self.failed[-1])
            self.save()


def numbers(text: str) -> list[int]:
    """Of "1,8,32"."""
    return [int(one) for one in text.split(",") if one]


def words(text: str, between: str = ",") -> list[str]:
    return [one for one in text.split(between) if one]


def steady_ms(step: Callable[[int], object], warm: int, calls: int) -> float:
    """The median of calls in a row, behind some that warm it up."""
    for i in range(warm):
        step(i)
    return statistics.median(burst(step, calls, DEVICE))
