"""What ranks tell of CUDA graphs of transformers that are divided along the sequence, with no GPU: a graph is the call
that was captured, made again. Run by `support.ranks.RankPool`.
"""

import contextlib
import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

import accel
from accel.cuda_graphs.entry import CallToCapture
from accel.cuda_graphs.fingerprint import Fingerprint
from accel.cuda_graphs.pool import GraphPool
from accel.cuda_graphs.rule import CAPTURED_SOON, GraphForward, obstacle
from accel.cuda_graphs.runner import GraphRunner
from accel.diffusion.dit import block
from accel.parallel.sequences import waited
from accel.patching.fast_forward import FastForward
from support.parallel.sequences import both, divided, model_and_inputs, off, plans_of

NAME = "FluxTransformer2DModel"


class Pretense:
    """GPUs in the place of CPUs. captures: ranks of each runner that captured. replays: how many there were."""

    def __init__(self, patch: pytest.MonkeyPatch, fails: bool):
        self.captures: list[int | None] = []
        self.replays, self.fails = 0, fails
        patch.setattr(GraphForward, "call", FastForward.call)
        patch.setattr(block, "_on_gpu", lambda held: True)
        patch.setattr(GraphPool, "limit_mb", lambda self, device: 100.0)
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        patch.setattr(GraphRunner, "_warm_up", lambda *args: False)
        patch.setattr(GraphRunner, "_capture_on_device", lambda *args: self.capture(*args))
        patch.setattr(GraphRunner, "_replay", lambda *args: self.replay(*args))

    def capture(self, runner: GraphRunner, entry: Any, call: CallToCapture, crowded: bool) -> None:
        self.captures.append(runner.ranks and runner.ranks.size)
        if self.fails:
            raise RuntimeError("the host reads numbers")
        entry.graph = SimpleNamespace(device=torch.device("cpu"), eager=call.eager, spec=call.spec)

    def replay(self, runner: GraphRunner, entry: Any, leaves: list, *rest: Any) -> Any:
        self.replays += 1
        args, kwargs = pytree.tree_unflatten(leaves, entry.graph.spec)
        return entry.graph.eager(*args, **kwargs)


@torch.no_grad()
def graphs(order: str, fails_on: int | None, options: dict) -> dict[str, Any]:
    """Four calls of a model, of which the second captures; on one rank it may fail.

    options: of the division, and graphs=False.
    """
    model, given = model_and_inputs(NAME)
    wished = {"graphs": options.pop("graphs", "auto")}
    whole, wanted = model(**given)[0], divided(copy.deepcopy(model), **options)(**given)[0]
    ours = both(model, order, wished, **options)
    found: dict[str, Any] = {"stock": off(wanted, whole)}
    with pytest.MonkeyPatch.context() as patch:
        pretense = Pretense(patch, fails_on == dist.get_rank())
        outputs = [ours(**given)[0] for _ in range(4)]
        found["off"] = [off(output, wanted) for output in outputs]
        found["exact"] = [torch.equal(output, wanted) for output in outputs]
        found["blocks"], found["plans"] = plans_of(ours)
        found["soon"] = CAPTURED_SOON.get()
    report = accel.report(ours)
    found |= {"captures": pretense.captures, "replays": pretense.replays, "told": report.fallbacks}
    found["rows"] = [(row["status"], row["reason"]) for row in report.graphs]
    return found


@torch.no_grad()
def obstacles() -> dict[str, Any]:
    """By what was done to a divided model: why it is not captured."""
    from diffusers.hooks import HookRegistry, ModelHook

    class Counting(ModelHook):
        pass

    def hook(model: Any) -> None:
        HookRegistry.check_if_exists_or_initialize(model.proj_out).register_hook(Counting(), "counting")

    def replace(model: Any) -> None:
        forward = model.proj_out.forward
        model.proj_out.forward = lambda *args: forward(*args)

    def replace_beneath(model: Any) -> None:
        forward = model.proj_out._diffusers_hook._fn_refs[0].forward
        model.proj_out._diffusers_hook._fn_refs[0].forward = lambda *args: forward(*args)

    def forget(model: Any) -> None:
        model._parallel_config = None

    def forget_mesh(model: Any) -> None:
        model._parallel_config.context_parallel_config._flattened_mesh = None

    def other(model: Any) -> None:
        model.transformer_blocks[0].attn.processor._parallel_config = copy.copy(model._parallel_config)
        config = copy.copy(model._parallel_config.context_parallel_config)
        model.transformer_blocks[0].attn.processor._parallel_config.context_parallel_config = config

    model, given = model_and_inputs(NAME)
    found: dict[str, Any] = {"whole": obstacle(model), "divided": obstacle(divided(copy.deepcopy(model)))}
    for change in (hook, replace, replace_beneath, forget, forget_mesh, other):
        changed = divided(copy.deepcopy(model))
        change(changed)
        found[change.__name__] = obstacle(changed)
    one = divided(copy.deepcopy(model))
    one(**given)
    fingerprint = Fingerprint(one)
    one(**given)
    found["holds"] = fingerprint.holds()
    hook(one)
    taken = Fingerprint(one)
    registry = one.proj_out._diffusers_hook
    registry.remove_hook(registry._hook_order[0])  # beneath the other, whose wrapper stays
    found["changed"] = not fingerprint.holds() and not taken.holds()
    return found


def arrived() -> tuple[bool, bool, bool]:
    """Of a tensor that ranks have sent, inside of a dictionary: whether it waits to be read, before and after."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_gather_tensor

    sent = all_gather_tensor(torch.ones(2), 0, dist.group.WORLD)
    found = waited({"a": (sent, torch.zeros(1)), "b": 3})
    got, plain = found["a"]
    right = torch.equal(got, torch.ones(4)) and torch.equal(plain, torch.zeros(1)) and found["b"] == 3
    return isinstance(sent, AsyncCollectiveTensor), type(got) is torch.Tensor, right
