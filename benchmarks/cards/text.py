"""A language model over several cards: transformers' tensor parallelism alone, with accel, and accel on one card.

    torchrun --nproc-per-node N -m benchmarks cards-text OUT.json [--models llama-8b,qwen3-30b-a3b+experts]

"+experts" behind a name of `accel bench llm` divides its experts whole. Random weights, the same on one card and
divided. Correctness first: logits of a prompt and of steps, against stock on one card where it fits. Then the time of a
step, told by two calls of generate() of different lengths, a prompt, seconds to ready, memory, and the kernels of a
step. Rank 0 writes. On a CPU all sizes are tiny.
"""

import time
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import accel
from accel.bench.llm.configs import CONFIGS
from accel.bench.llm.generate import decode_steps, prompts
from accel.bench.llm.models import config_of, endless, prompt
from accel.bench.memory import release
from accel.bench.processes import ranks
from accel.bench.timing import seconds
from accel.comparison import relative_rms
from accel.libraries.cache import cache_given, cache_of
from accel.parallel.ranks import Ranks
from accel.parallel.sharded_layers import divided, local
from accel.tolerances import DRIFT, LAYER_NOISE, LOGITS, bound
from accel.verification.noise import with_rounding
from benchmarks.models.launches import profiled, summary
from benchmarks.study import HALF, TOY, Study, numbers, words

CONTEXT = 512
FEW, STOCK_MANY = 8, 16
SPREAD = 0.02  # of random weights
ONE_CARD_GB = 60  # a model up to here is built whole on each card too
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256, "head_dim": 16}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TINY |= {"num_experts": 8}


def weight(name: str, shape: tuple, device: torch.device) -> torch.Tensor:
    """Random numbers that are the same wherever the weight of this name is made; ones for norms."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=HALF, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=HALF, device=device) * SPREAD


def build(name: str, device: torch.device, plan: dict | None) -> nn.Module:
    """The model with random weights: whole on this card, or its part by transformers' own division."""
    from torch.distributed.tensor import distribute_tensor

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(name), dtype=HALF).eval()
    if plan is not None:
        kind = type(model)
        wanted, _, mesh = kind.prepare_distribute_model(DistributedConfig(**plan))
        model = kind.maybe_distribute_model(model, wanted, mesh)
    for path, module in model.named_modules():
        for own, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            full = weight(f"{path}.{own}", tuple(parameter.shape), device)
            if divided(parameter):
                full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            module._parameters[own] = nn.Parameter(full, requires_grad=False)
        if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
            with torch.device(device):
                made = type(module)(config=model.config)  # tables of rotations
            module._buffers.update(made._buffers)
            vars(module).update({k: v for k, v in vars(made).items() if isinstance(v, torch.Tensor)})
    model.tie_weights()
    return endless(model)


def whole_experts(ranks: int) -> dict:
    """How this transformers is asked to leave each expert whole on some rank."""
    named = "ep_size" in DistributedConfig.__annotations__  # since 5.18
    return {"ep_size": ranks} if named else {"enable_expert_parallel": True}


class Timed:
    """One model, by calls that all ranks make in the same order."""

    def __init__(self, model: nn.Module, device: torch.device):
        self.model, self.device = model, device

    def seconds(self, inputs: dict, tokens: int) -> float:
        return seconds(partial(self.model.generate, **inputs, max_new_tokens=tokens, do_sample=False), self.device)

    def figures(self, rows: list[int], tokens: int, many: int) -> dict[str, dict]:
        """Milliseconds of a decode step by rows, and of a prompt: without a budget all ranks take as many turns."""
        one = {"": self.model}
        steps = {number: decode_steps(one, number, CONTEXT, many - FEW, 0.0)[""] for number in rows}
        found = {f"rows {number}": row | {"step_ms": row["ms_step"]} for number, row in steps.items()}
        return found | {"prompt": {"prompt_ms": prompts(one, tokens, 0.0)[""]["call_ms"]}}

    def logits(self, steps: int = 6) -> torch.Tensor:
        """(tokens, words) float32: of a prompt's last token and of steps behind it, over tokens that are given."""
        ids = prompt(self.model, 2, 40 + steps)["input_ids"]
        out = self.model(ids[:, :40], use_cache=True)
        found = [out.logits[:, -1]]
        given = cache_given(type(self.model).forward, cache_of(out))
        for at in range(40, 40 + steps):
            out = self.model(ids[:, at : at + 1], use_cache=True, **given)
            found.append(out.logits[:, -1])
        return torch.cat(found).float()

    def profile(self, tokens: int = 24) -> dict:
        """Kernels of a call with a prompt and so many steps. One that waits for its turn counts as at work."""
        run = partial(self.seconds, prompt(self.model, 1, CONTEXT), tokens)
        return {"tokens": tokens} | summary(profiled(lambda _: run(), self.device), 1e3 * run())


def measure(name: str, parts: list[str], rows: list[int], tokens: int, many: int, ranks: Ranks, device) -> dict:
    base, _, how = name.partition("+")
    plan: dict[str, Any] = {"tp_size": ranks.size} | (whole_experts(ranks.size) if how == "experts" else {})
    row: dict[str, Any] = {"model": name, "plan": plan}
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config_of(base))
    size = sum(p.numel() for p in whole.parameters()) * HALF.itemsize
    row["weights_gb"], wanted = round(size / 1e9, 2), None
    if size < ONE_CARD_GB * 1e9:
        one = Timed(build(base, device, None), device)
        wanted = one.logits()
        if "one" in parts:
            accel.optimize(one.model, cpu="fuse")
            off = relative_rms(one.logits(), wanted)
            row["one card"] = one.figures(rows, tokens, many) | {"off_from_stock": off}
        del one
        release(device)
    several = Timed(build(base, device, plan), device)
    model = several.model
    if "stock" in parts:
        row["stock"] = several.figures(rows, tokens, FEW + STOCK_MANY)
    alone = several.logits()
    with with_rounding(model.get_decoder().layers, LAYER_NOISE):
        row["rounding_moves_stock"] = relative_rms(several.logits(), alone)
    if wanted is not None:
        row["stock_off_from_one_card"] = relative_rms(alone, wanted)
    if not TOY:
        torch.cuda.reset_peak_memory_stats()
    row["optimize_s"] = round(seconds(partial(accel.optimize, model, cpu="fuse"), device), 3)
    row["ready_s"] = round(row["optimize_s"] + several.seconds(prompt(model, 1, CONTEXT), 4), 3)
    got = several.logits()
    row["off_from_stock"] = relative_rms(got, alone)
    if wanted is not None:
        row["off_from_one_card"] = relative_rms(got, wanted)
    assert row["off_from_stock"] < max(bound(LOGITS, HALF), DRIFT * row["rounding_moves_stock"]), row
    row["accel"] = several.figures(rows, tokens, many)
    if not TOY:
        row["peak_mb"] = round(torch.cuda.max_memory_allocated() / 2**20)
        row["share_mb"] = round(sum(local(p).nbytes for p in model.parameters()) / 2**20)
        row["profile"] = several.profile()
    report = accel.report(model)
    row["sites"] = report.summary() if hasattr(report, "summary") else str(report).splitlines()[0]
    row |= {"fallbacks": report.fallbacks[:8], "graphs": len(report.graphs)}
    row["symmetric memory"] = ranks.memory is not None
    accel.restore(model)
    row["restored_bit_equal"] = bool(torch.equal(several.logits(), alone))
    return row


def main(
    out: Path, models: str = "llama-8b", parts: str = "one,stock", rows: str = "1,8,32", tokens: int = 2048,
    many: int = 72,
):  # fmt: skip
    """tokens: of the prompt. many: new tokens of the longer calls."""
    with ranks("nccl") as device:
        if TOY:
            for name, (kind, given) in list(CONFIGS.items()):
                CONFIGS[name] = kind, given | {k: v for k, v in TINY.items() if k in given or k == "head_dim"}
        world = Ranks.of(dist.group.WORLD)
        record = Study("many-cards-text", out, "a language model over cards", ranks=world.size, models=[])
        for name in words(models):
            start = time.perf_counter()
            with record.attempt(model=name):
                row = measure(name, words(parts), numbers(rows), tokens, many, world, device)
                record.add("models", row | {"took_s": round(time.perf_counter() - start, 1)})
            release(device)
            if record.failed:
                break  # the ranks may be apart
