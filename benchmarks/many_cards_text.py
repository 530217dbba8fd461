"""A language model over several cards: transformers' tensor parallelism alone, with accel, and accel on one card.

    torchrun --nproc-per-node N benchmarks/many_cards_text.py OUT.json [MODEL ...] [--part NAME ...]

MODEL: names of `accel bench llm`; "+experts" behind one divides its experts whole (`ep_size`). Random weights, the same
on one card and divided. Correctness first: logits of a prompt and of steps, against stock on one card where it fits.
Then calls of generate() in turns, the time of a step told by two calls of different lengths, a prompt, seconds to
ready, memory, the kernels of one step, and sums over the cards by each way there is. Rank 0 writes.
"""

import argparse
import json
import os
import statistics
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sums_over_cards import off, sums
from torch import nn
from transformer_profile import kernels, summary

import accel
from accel.bench.llm.configs import CONFIGS
from accel.bench.llm.models import config_of, prompt
from accel.bench.machine import provenance
from accel.bench.memory import release
from accel.errors import told
from accel.parallel.ranks import Ranks
from accel.parallel.sharded_layers import divided
from accel.tolerances import DRIFT, LAYER_NOISE, LOGITS, bound
from accel.verification.noise import with_rounding

CONTEXT, PROMPT = 512, 2048
FEW, MANY, STOCK_MANY = 8, 72, 16
ROUNDS = 3
ROWS = (1, 8, 32)
SPREAD = 0.02  # of random weights
ONE_CARD_GB = 60  # a model up to here is built whole on each card too


def weight(name: str, shape: tuple, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random numbers that are the same wherever the weight of this name is made; ones for norms."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=dtype, device=device) * SPREAD


def build(name: str, device: torch.device, dtype: torch.dtype, plan: dict | None) -> nn.Module:
    """The model with random weights: whole on this card, or its part by transformers' own division."""
    from torch.distributed.tensor import distribute_tensor
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(name), dtype=dtype).eval()
    if plan is not None:
        kind = type(model)
        wanted, _, mesh = kind.prepare_distribute_model(DistributedConfig(**plan))
        model = kind.maybe_distribute_model(model, wanted, mesh)
    for path, module in model.named_modules():
        for own, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            full = weight(f"{path}.{own}", tuple(parameter.shape), dtype, device)
            if divided(parameter):
                full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            module._parameters[own] = nn.Parameter(full, requires_grad=False)
        if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
            with torch.device(device):
                made = type(module)(config=model.config)  # tables of rotations
            module._buffers.update(made._buffers)
            vars(module).update({k: v for k, v in vars(made).items() if isinstance(v, torch.Tensor)})
    model.tie_weights()
    model.generation_config.eos_token_id = model.config.get_text_config().vocab_size
    model.generation_config.pad_token_id = 0
    return model


def whole_experts(ranks: int) -> dict:
    """How this transformers is asked to leave each expert whole on some rank."""
    from transformers.distributed import DistributedConfig

    named = "ep_size" in DistributedConfig.__annotations__  # since 5.18
    return {"ep_size": ranks} if named else {"enable_expert_parallel": True}


def seconds(run: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


@torch.no_grad()
def step_ms(model: nn.Module, rows: int, many: int, rounds: int = ROUNDS, context: int = CONTEXT) -> dict:
    """Milliseconds of a decode step: medians of the difference of calls that write few and many tokens."""
    inputs = prompt(model, rows, context)

    def call(tokens: int) -> float:
        given = {"max_new_tokens": tokens, "do_sample": False}
        return seconds(lambda: model.generate(**inputs, **given))

    first = call(FEW)
    call(many), call(many)
    found = [(call(many) - call(FEW)) / (many - FEW) * 1e3 for _ in range(rounds)]
    return {"step_ms": round(statistics.median(found), 4), "all_ms": found, "first_s": round(first, 3)}


@torch.no_grad()
def prompt_ms(model: nn.Module, tokens: int, rounds: int = ROUNDS) -> dict:
    inputs = prompt(model, 1, tokens)
    run = partial(model.generate, **inputs, max_new_tokens=1, do_sample=False)
    first, *_ = [seconds(run) for _ in range(4)]
    return {
        "prompt_ms": round(statistics.median(seconds(run) for _ in range(rounds)) * 1e3, 3),
        "first_s": round(first, 3),
    }


@torch.no_grad()
def logits(model: nn.Module, steps: int = 6) -> torch.Tensor:
    """(tokens, words) float32: of a prompt's last token and of steps behind it, over tokens that are given."""
    ids = prompt(model, 2, 40 + steps)["input_ids"]
    out = model(ids[:, :40], use_cache=True)
    found, cache = [out.logits[:, -1]], out.past_key_values
    for at in range(40, 40 + steps):
        out = model(ids[:, at : at + 1], past_key_values=cache, use_cache=True)
        found.append(out.logits[:, -1])
    return torch.cat(found).float()


def kernels_of_steps(model: nn.Module, rows: int, device: torch.device, tokens: int = 24) -> dict:
    """Of calls with a prompt and so many steps, of the replays of their graph. A kernel that waits for its turn counts
    as at work.
    """
    given = {"max_new_tokens": tokens, "do_sample": False}
    run = partial(model.generate, **prompt(model, rows, CONTEXT), **given)
    return {"tokens": tokens} | summary(kernels(lambda _: run(), device), 1e3 * seconds(run))


def measure(name: str, args: argparse.Namespace, ranks: Ranks, device: torch.device, dtype: torch.dtype) -> dict:
    base, _, how = name.partition("+")
    plan: dict[str, Any] = {"tp_size": ranks.size} | (whole_experts(ranks.size) if how == "experts" else {})
    row: dict[str, Any] = {"model": name, "plan": plan}
    many = args.many
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config_of(base)).parameters()) * dtype.itemsize
    row["weights_gb"] = round(size / 1e9, 2)
    wanted = None
    if size < ONE_CARD_GB * 1e9:
        whole = build(base, device, dtype, None)
        wanted = logits(whole)
        if "one" in args.part:
            accel.optimize(whole, cpu="fuse")
            row["one card"] = {f"rows {rows}": step_ms(whole, rows, many) for rows in args.rows}
            row["one card"]["prompt"] = prompt_ms(whole, args.prompt)
            row["one card"]["off_from_stock"] = off(logits(whole), wanted)
        del whole
        _free(device)
    model = build(base, device, dtype, plan)
    if "stock" in args.part:
        row["stock"] = {f"rows {rows}": step_ms(model, rows, FEW + STOCK_MANY, 2) for rows in args.rows}
        row["stock"]["prompt"] = prompt_ms(model, args.prompt)
    alone = logits(model)
    layers = model.get_decoder().layers
    with with_rounding(layers, LAYER_NOISE):
        row["rounding_moves_stock"] = off(logits(model), alone)
    if wanted is not None:
        row["stock_off_from_one_card"] = off(alone, wanted)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    row["optimize_s"] = round(seconds(partial(accel.optimize, model, cpu="fuse")), 3)
    first = partial(model.generate, **prompt(model, 1, CONTEXT), max_new_tokens=4)
    row["ready_s"] = round(row["optimize_s"] + seconds(first), 3)
    del first
    got = logits(model)
    row["off_from_stock"] = off(got, alone)
    if wanted is not None:
        row["off_from_one_card"] = off(got, wanted)
    assert row["off_from_stock"] < max(bound(LOGITS, dtype), DRIFT * row["rounding_moves_stock"]), row
    row["accel"] = {f"rows {rows}": step_ms(model, rows, many) for rows in args.rows}
    row["accel"]["prompt"] = prompt_ms(model, args.prompt)
    if torch.cuda.is_available():
        row["peak_mb"] = round(torch.cuda.max_memory_allocated() / 2**20)
        row["share_mb"] = round(sum(_bytes(p) for p in model.parameters()) / 2**20)
        row["profile"] = kernels_of_steps(model, 1, device)
    report = accel.report(model)
    row["sites"] = report.summary() if hasattr(report, "summary") else str(report).splitlines()[0]
    row["fallbacks"] = report.fallbacks[:8]
    row["graphs"] = len(report.graphs)
    row["symmetric memory"] = ranks.memory is not None
    accel.restore(model)
    again = logits(model)
    row["restored_bit_equal"] = bool(torch.equal(again, alone))
    del model
    _free(device)
    return row


def _bytes(parameter: torch.Tensor) -> int:
    from accel.parallel.sharded_layers import local

    return local(parameter).nbytes


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        release(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="*", default=["llama-8b"])
    parser.add_argument("--part", nargs="*", default=["sums", "one", "stock"])
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--many", type=int, default=MANY)
    parser.add_argument("--tiny", action="store_true", help="two layers of small size, to try the script")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    if args.tiny:
        small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256, "head_dim": 16}
        small |= {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_experts": 8,
        }
        for name in CONFIGS:
            kind, given = CONFIGS[name]
            CONFIGS[name] = kind, given | {k: v for k, v in small.items() if k in given or k == "head_dim"}
    ranks = Ranks.of(dist.group.WORLD)
    result: dict[str, Any] = {"case": "many-cards-text", "ranks": ranks.size, **provenance(device, dtype), "models": []}

    def keep() -> None:
        if ranks.rank == 0:
            args.out.write_text(json.dumps(result, indent=1, default=str) + "\n")

    if "sums" in args.part and cuda:
        result["sums"] = sums(ranks, device)
        keep()
        if ranks.rank == 0:
            print(*result["sums"], sep="\n", flush=True)
    for name in args.models:
        start = time.perf_counter()
        try:
            row = measure(name, args, ranks, device, dtype)
        except Exception as error:
            row = {"model": name, "failed": told(error)}
            print(f"rank {ranks.rank}: {name}: {row['failed']}", flush=True)
            import traceback

            traceback.print_exc()
        row["took_s"] = round(time.perf_counter() - start, 1)
        result["models"].append(row)
        keep()
        if ranks.rank == 0:
            brief = {key: value for key, value in row.items() if key != "profile"}
            print(json.dumps(brief, default=str), flush=True)
        if "failed" in row:
            break  # the ranks may be apart
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
