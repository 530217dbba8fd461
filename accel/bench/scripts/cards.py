"""Scripts of several GPUs: layers spread over them in one process, and ranks that share each layer."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accel.bench.llm.models import endless, spread
from accel.bench.scripts.generation import generating, published
from accel.bench.scripts.script import Built, Size, script


@script("llama-two-cards", "Llama-8B, its layers spread over two GPUs by device_map, 512 tokens in, 64 out", cards=2)
def spread_layers(size: Size) -> Built:
    return generating(spread(published(size, "llama-8b"), 2), size)


@script("llama-two-ranks", "Llama-3B by tensor parallelism of two ranks, 512 tokens in, 64 out", cards=2, ranks=2)
def shared_layers(size: Size) -> Built:
    """In each of the ranks; the first saves the checkpoint that all load."""
    from transformers import AutoModelForCausalLM

    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        published(size, "llama-3b").save_pretrained(folder[0])
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(folder[0], dtype=size.bf16, tp_plan="auto")
    dist.barrier()
    if dist.get_rank() == 0:
        for file in Path(folder[0]).iterdir():
            file.unlink()
        os.rmdir(folder[0])
    return generating(endless(model.eval().requires_grad_(False)), size)


def main(name: str, tiny: str) -> None:
    """One of the ranks that torchrun starts for a script; the first prints the row as JSON."""
    from accel.bench.scripts.registry import SCRIPTS
    from accel.bench.scripts.runner import run_row

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
    main(*sys.argv[1:])
