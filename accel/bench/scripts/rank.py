"""One of the ranks that torchrun starts for a script of `ranks`."""

import json
import os
import sys

import torch
import torch.distributed as dist

from accel.bench.scripts.registry import SCRIPTS
from accel.bench.scripts.runner import run_row
from accel.bench.scripts.script import Size


def take_part(name: str, tiny: str) -> None:
    """The first rank prints the row as JSON."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    row = run_row(SCRIPTS[name], Size(device, bool(int(tiny))), 0.0)  # without a budget all ranks take as many turns
    if dist.get_rank() == 0:
        print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    take_part(*sys.argv[1:])
