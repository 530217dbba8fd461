"""Whether every row of the long tables runs, as in `make test-all`."""

import functools
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

EVERYTHING = bool(os.environ.get("ACCEL_TEST_EVERYTHING"))


def always(rows: Iterable, *names: object) -> list:
    """Rows of a table, of which its share never leaves out the named ones: each alone shows a fault of tests/faults."""
    return [pytest.param(row, marks=pytest.mark.share(1)) if row in names else row for row in rows]


@functools.cache
def commit() -> int | None:
    """The number of the commit that is checked out, which says whose turn it is; None where git does not know."""
    try:
        command = ["git", "rev-parse", "HEAD"]
        told = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return int(told.stdout, 16) if told.returncode == 0 else None


def has_turn(number: int, turns: int) -> bool:
    """Whether the row of this number runs at this commit, of which one in so many does; without a commit all do."""
    return EVERYTHING or commit() is None or (number + commit()) % turns == 0
