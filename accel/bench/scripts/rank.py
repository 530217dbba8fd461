"""One of the ranks that torchrun starts for a script of `ranks`."""

import json
import sys

import torch.distributed as dist

from accel.bench.processes import ranks
from accel.bench.scripts.registry import SCRIPTS
from accel.bench.scripts.runner import run_row
from accel.bench.scripts.script import Size


def take_part(name: str, tiny: str) -> None:
    """The first rank prints the row as JSON."""
    with ranks() as device:
        row = run_row(SCRIPTS[name], Size(device, bool(int(tiny))), 0.0)  # without a budget all take as many turns
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    take_part(*sys.argv[1:])
