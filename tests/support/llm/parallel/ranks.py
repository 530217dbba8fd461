"""What ranks are told to do with a saved language model, and what they tell of it. Run by `support.ranks.RankPool`."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import accel
from accel.llm.generation.trial import fused_layers, fused_logits, stock_logits
from accel.llm.recording.resting import resting
from accel.parallel.sharded_layers import ranks_of
from support.llm import families
from support.noted import call_counts

COLLECTIVES = ("all_reduce", "all_gather_into_tensor")


def load(folder: str, plan: dict, **given: Any) -> nn.Module:
    """A model divided among all ranks. plan: of `DistributedConfig`, by keywords."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**plan), **given).eval()


@contextmanager
def counted():
    """How often each collective of torch.distributed is asked for inside."""
    with pytest.MonkeyPatch.context() as patch:
        yield call_counts(patch, {name: (dist, name) for name in COLLECTIVES})


def write(folder: str, calls: list[dict], options: dict, plan: Any, given: dict) -> dict:
    """As `written`. given: of from_pretrained."""
    return written(load(folder, plan, **given), calls, options)


def written(model: nn.Module, calls: list[dict], options: dict) -> dict:
    """The tokens of each generate() call, stock and optimized, with what the report says; then restored.

    calls: keywords of generate().
    """
    found: dict = {"stock": [], "optimized": [], "collectives": []}
    with torch.no_grad():
        before = model(calls[0]["input_ids"]).logits
        for kind in ("stock", "optimized"):
            if kind == "optimized":
                accel.optimize(model, cpu="fuse", **options)
            for call in calls:
                torch.manual_seed(0)
                with counted() as collectives:
                    found[kind].append(model.generate(**call).tolist())
                found["collectives"].append(dict(collectives))
        report = accel.report(model)
        found |= {"sites": report.sites, "graphs": report.graphs, "fallbacks": report.fallbacks}
        found["shared_memory"] = ranks_of(model).memory is not None
        accel.restore(model)
        found["restored"] = torch.equal(before, model(calls[0]["input_ids"]).logits)
    found["with gradients"] = (model(calls[0]["input_ids"]).logits - before).abs().max().item()
    return found


def padded_call(device: str, steps: int) -> dict:
    """Keywords of a greedy generate() of two rows, the second padded."""
    ids, mask = families.padded((9, 5))
    return {
        "input_ids": ids.to(device), "attention_mask": mask.to(device), "max_new_tokens": steps, "do_sample": False,
    }  # fmt: skip


def write_on_gpus(folder: str, calls: int, steps: int, plan: dict) -> dict:
    """As `write`, of so many equal calls; sums in a graph are not asked for."""
    found = write(folder, [padded_call("cuda", steps) for _ in range(calls)], {}, plan, {})
    return {name: value for name, value in found.items() if name != "collectives"}


def trial(folder: str, plan: dict, lengths: tuple[int, ...]) -> dict:
    """How far off the logits of its trial are, by what each bound of them is about; and what the report says of it."""
    model = accel.optimize(load(folder, plan), cpu="fuse")
    forward = vars(model).get("forward")
    found = {"sites": accel.report(model).sites}
    if forward is not None:
        with resting(model):
            wanted, _ = stock_logits(forward, lengths)
            with fused_layers(forward):
                got = fused_logits(forward, lengths)
            found |= {"off": wanted.off(got), "row": wanted.row_off(got), "moves": wanted.moves()}
    return found
