"""A language model loaded by ranks: from whole files, as transformers does it, and each rank from files of its own.

    torchrun --nproc-per-node N -m benchmarks loading-shards OUT.json [--layers N --hidden N --rounds N --folder FOLDER]

A model of llama's kind with random weights in bfloat16, saved, and divided by `accel shard`. Both are loaded in turns,
after the kernel was asked to forget the files, and every weight is read once, as a file that is mapped is read when it
is touched. Seconds are those of the slowest rank. Bytes from the disk are those that the kernel counts for each process
(/proc/self/io). Ranks of one host read the same files: what one has read another finds in the cache. "a host each" are
ranks with a copy of their own, which share no cache, as on several hosts; still they share one disk here. Before, the
weights of both models are compared. Rank 0 writes.
"""

import gc
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig
from transformers.utils import logging

import accel
from accel.bench.timing import Clock, take_turns
from accel.llm.shards.divide import divide
from accel.parallel.sharded_layers import local
from benchmarks.cards.ranks import of_all, ranks
from benchmarks.study import Study

VOCABULARY = 8192


def build(folder: Path, layers: int, hidden: int, ranks: int) -> dict:
    """Writes both folders; what was written, and how long the division took."""
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 256}
    config = LlamaConfig(num_hidden_layers=layers, dtype=torch.bfloat16, **sizes, **heads)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "whole", max_shard_size="100MB")
    clock = Clock()
    manifest = divide(folder / "whole", folder / "parts", ranks)
    taken = round(clock.taken(), 3)
    whole = sum(file.stat().st_size for file in (folder / "whole").glob("*.safetensors"))
    by_rank = [sum(file.bytes for file in files) for files in manifest.files]
    return {"bytes_whole": whole, "bytes_by_rank": by_rank, "seconds_to_divide": taken}


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


def measured(load: Callable[[], nn.Module], folder: Path) -> list[tuple[float, int]]:
    """By rank: seconds until every weight was read, and bytes that the process had from the disk."""
    gc.collect()  # a model that is divided is held by its own closures; what is mapped is not forgotten
    dist.barrier()
    forget(folder)
    dist.barrier()
    before, clock = read_from_disk(), Clock()
    for parameter in load().parameters():
        local(parameter).clone()
    return of_all((clock.taken(), read_from_disk() - before))


def summary(rounds: list[list[tuple[float, int]]]) -> dict:
    """rounds: of each, seconds and bytes by rank."""
    slowest = [max(seconds for seconds, _ in every) for every in rounds]
    counts = [[count for _, count in every] for every in rounds]
    return {
        "median_seconds": round(statistics.median(slowest), 3),
        "seconds": [round(seconds, 3) for seconds in slowest],
        "median_bytes_by_rank": [int(statistics.median(of_rank)) for of_rank in zip(*counts, strict=True)],
        "bytes_all_ranks": [sum(every) for every in counts],
    }


def main(out: Path, layers: int = 8, hidden: int = 1024, rounds: int = 7, folder: Path | None = None) -> None:
    """folder: where the files are written, for a while."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with tempfile.TemporaryDirectory(dir=folder) as own:
        built = build(Path(own), layers, hidden, world) if rank == 0 else {}
        with ranks() as device:
            shared = Path(of_all(own)[0])
            stock, ours = (load() for load in ways(shared, world).values())
            same = [torch.equal(local(one), local(ours.get_parameter(name))) for name, one in stock.named_parameters()]
            del stock, ours
            own_copy = shared / f"host-{rank}"
            for name in ("whole", "parts"):
                shutil.copytree(shared / name, own_copy / name)
            samples = {
                (place, kind): lambda load=load, where=where: measured(load, where)
                for place, where in {"one host": shared, "a host each": own_copy}.items()
                for kind, load in ways(where, world).items()
            }
            found = take_turns(samples, least=rounds, most=rounds)
            about = f"{layers} layers of {hidden} channels over {world} ranks, {device.type}"
            record = Study("loading-shards", out, about, dtype=torch.bfloat16, same_weights=all(of_all(all(same))))
            record.body["loading"] = {f"{place}, {kind}": summary(every) for (place, kind), every in found.items()}
            record.keep_rows(built)
            dist.barrier()
