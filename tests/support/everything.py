"""Whether every row of the long tables runs, as in `make test-all`."""

import os
from collections.abc import Iterable

import pytest

EVERYTHING = bool(os.environ.get("ACCEL_TEST_EVERYTHING"))


def always(rows: Iterable, *names: object) -> list:
    """Rows of a table, of which the named ones are never left out: each alone shows a fault of tests/faults."""
    return [pytest.param(row, marks=pytest.mark.share(1)) if row in names else row for row in rows]
