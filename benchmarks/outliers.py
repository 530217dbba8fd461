"""What it takes to keep columns of outliers in 16 bits while rows are rounded to int8.

python benchmarks/outliers.py OUT.json: 2048 rows, three columns planted; microseconds of `quantise_rows` without
outliers, with those above 6 found in the call, and with columns that are known; least of replays of a
graph over twelve distinct inputs.
"""

import json
import sys
from pathlib import Path

import torch
from accel_kernels import Norm, quantise_rows
from accel_kernels.quantise_rows import KnownColumns
from decode_chain import milliseconds

from accel.bench.machine import commit, machine, now

DEVICE, ROWS, INPUTS = torch.device("cuda"), 2048, 12
PLANTED = [3, 500, 777]
WAYS = {"none": None, "found, above 6": 6.0, "known": torch.tensor(PLANTED)}


def measured(columns: int, norm: Norm | None) -> dict:
    inputs = [torch.randn(ROWS, columns, device=DEVICE, dtype=torch.bfloat16) for _ in range(INPUTS)]
    for x in inputs:
        x[:, PLANTED] *= 20
    ours, theirs = (op(inputs[0], norm=norm, outliers=6.0) for op in (quantise_rows.triton, quantise_rows.reference))
    count = int(theirs.count)
    if int(ours.count) != count or not torch.equal(ours.columns[:count], theirs.columns[:count]):
        raise AssertionError(f"{int(ours.count)} outliers found, {count} in the reference")
    found = {"rows": ROWS, "columns": columns, "norm": norm is not None, "outliers": count}
    for name, outliers in WAYS.items():
        given = KnownColumns.of(outliers.to(DEVICE), columns) if isinstance(outliers, torch.Tensor) else outliers
        ms = milliseconds(lambda: [quantise_rows.triton(x, norm=norm, outliers=given) for x in inputs])  # noqa: B023
        found[name] = round(1e3 * ms / INPUTS, 2)
    return found


def main(path: Path) -> None:
    norm = Norm(torch.ones(4096, device=DEVICE, dtype=torch.bfloat16), None, 1e-5)
    rows = [measured(columns, one) for columns, one in ((4096, norm), (4096, None), (14336, None))]
    result = {"case": "outliers", "date": now(), "commit": commit(), "machine": machine(DEVICE), "us": rows}
    path.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    with torch.no_grad():
        main(Path(sys.argv[1]))
