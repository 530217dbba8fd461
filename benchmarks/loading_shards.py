"""A language model loaded by ranks: from whole files, as transformers does it, and each rank from files of its own.

    torchrun --nproc-per-node N benchmarks/loading_shards.py OUT.json [--layers N --hidden N --rounds N --folder FOLDER]

A model of llama's kind with random weights in bfloat16, saved, and divided by `accel shard`. Both are loaded in turns,
after the kernel was asked to forget the files, and every weight is read once, as a file that is mapped is read when it
is touched. Seconds are those of the slowest rank. Bytes from the disk are those that the kernel counts for each process
(/proc/self/io). Ranks of one host read the same files: what one has read another finds in the cache. "a host each" are
ranks with a copy of their own, which share no cache, as on several hosts; still they share one disk here. Before, the
weights of both models are compared. Rank 0 writes.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig
from transformers.utils import logging

import accel
from accel.bench.machine import provenance
from accel.llm.shards.divide import divide
from accel.parallel.sharded_layers import local

VOCABULARY = 8192


def build(folder: Path, layers: int, hidden: int, ranks: int) -> dict:
    """Writes both folders; what was written, and how long the division took."""
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 256}
    config = LlamaConfig(num_hidden_layers=layers, dtype=torch.bfloat16, **sizes, **heads)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "whole", max_shard_size="100MB")
    start = time.perf_counter()
    manifest = divide(folder / "whole", folder / "parts", ranks)
    seconds = time.perf_counter() - start
    whole = sum(file.stat().st_size for file in (folder / "whole").glob("*.safetensors"))
    by_rank = [sum(file.bytes for file in files) for files in manifest.files]
    return {"bytes_whole": whole, "bytes_by_rank": by_rank, "seconds_to_divide": round(seconds, 3)}


def ways(folder: Path, ranks: int) -> dict[str, Callable[[], nn.Module]]:
    def whole() -> nn.Module:
        config = DistributedConfig(tp_size=ranks, tp_plan="auto")
        return AutoModelForCausalLM.from_pretrained(folder / "whole", distributed_config=config, dtype="auto")

    return {"whole files": whole, "own files": lambda: accel.load(folder / "parts")}


def forget(folder: Path) -> None:
    for file in folder.rglob("*.safetensors"):
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_from_disk() -> int:
    told = Path("/proc/self/io").read_text().split()
    return int(told[told.index("read_bytes:") + 1])


def measured(load: Callable[[], nn.Module], folder: Path) -> tuple[float, int]:
    """Seconds until every weight was read, and bytes that this process had from the disk."""
    gc.collect()  # a model that is divided is held by its own closures; what is mapped is not forgotten
    dist.barrier()
    forget(folder)
    dist.barrier()
    before, start = read_from_disk(), time.perf_counter()
    model = load()
    for parameter in model.parameters():
        local(parameter).clone()
    return time.perf_counter() - start, read_from_disk() - before


def summary(rounds: list[list[tuple[float, int]]]) -> dict:
    """rounds: of each, seconds and bytes by rank."""
    slowest = [max(seconds for seconds, _ in every) for every in rounds]
    return {
        "median_seconds": round(statistics.median(slowest), 3),
        "seconds": [round(seconds, 3) for seconds in slowest],
        "median_bytes_by_rank": [int(statistics.median(counts)) for counts in zip(*_counts(rounds), strict=True)],
        "bytes_all_ranks": [sum(counts) for counts in _counts(rounds)],
    }


def _counts(rounds: list[list[tuple[float, int]]]) -> list[list[int]]:
    return [[count for _, count in every] for every in rounds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where the files are written, for a while")
    given = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with tempfile.TemporaryDirectory(dir=given.folder) as own:
        built = build(Path(own), given.layers, given.hidden, ranks) if rank == 0 else {}
        dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
        shared = [own]
        dist.broadcast_object_list(shared)
        folder = Path(shared[0])
        kinds = ways(folder, ranks)
        stock, ours = (load() for load in kinds.values())
        same = all(torch.equal(local(one), local(ours.get_parameter(name))) for name, one in stock.named_parameters())
        device = next(ours.parameters()).device
        del stock, ours
        own_copy = folder / f"host-{rank}"
        for name in ("whole", "parts"):
            shutil.copytree(folder / name, own_copy / name)
        places = {"one host": folder, "a host each": own_copy}
        found: dict[str, dict[str, list]] = {place: {kind: [] for kind in kinds} for place in places}
        for _ in range(given.rounds):
            for place, where in places.items():
                for kind, load in ways(where, ranks).items():
                    every: list = [None] * ranks
                    dist.all_gather_object(every, measured(load, where))
                    found[place][kind].append(every)
        agreed: list = [None] * ranks
        dist.all_gather_object(agreed, same)
        dist.barrier()
    if rank == 0:
        rounds = {place: {kind: summary(one) for kind, one in kinds.items()} for place, kinds in found.items()}
        told = {"case": "loading-shards", "ranks": ranks, "layers": given.layers, "hidden": given.hidden}
        told |= {"device": device.type, "same_weights": all(agreed)} | built
        told |= provenance(device, torch.bfloat16) | {"loading": rounds}
        given.out.write_text(json.dumps(told, indent=1) + "\n")
        print(json.dumps(told, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
