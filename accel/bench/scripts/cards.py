"""Scripts of several GPUs: layers spread over them in one process, and ranks that share each layer."""

import shutil
import tempfile
from typing import Any

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
        shutil.rmtree(folder[0])
    return generating(endless(model.eval().requires_grad_(False)), size)
