"""A model in each of three states, in fresh processes: with empty caches, with those that it left, and stock."""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from accel.bench.processes import spawn

STATES = ("cold", "warm", "stock")
PROCESS = "accel.bench.ready.process"


def measure_states(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    states: Iterable[str] = STATES,
    more: tuple[str, ...] = (),
    limit: float | None = None,
) -> dict[str, dict[str, Any]]:
    """A row of figures for each state, see `process.measure`; over_stock_s: ready_s beyond stock's own first call.

    more: further arguments of the process. limit: seconds that one may take. Raises RuntimeError where one fails or
    takes longer.
    """
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="accel-ready-") as folder:
        for state in states:
            given = [name, state, str(device), str(dtype).removeprefix("torch."), *more]
            rows[state] = spawn(PROCESS, given, Path(folder), limit)
    if "stock" in rows:
        for state in rows.keys() - {"stock"}:
            rows[state]["over_stock_s"] = round(rows[state]["ready_s"] - rows["stock"]["first_call_s"], 3)
    return rows
