"""Models with accelerate's hooks, as `device_map="auto"` leaves them, on one CPU.

"cpu:0" is the same CPU to a tensor and another device to whoever compares names: what is brought there is copied, and
whatever is kept there is kept apart.
"""

import copy

import torch
from accelerate import dispatch_model
from torch import nn

import accel
from accel.libraries.hooks import HOOK
from accel.llm.pipeline.stretch import ChainedStep
from support.llm.families import layers, make, prompt
from support.state import assert_same_state, snapshot

DEVICES = (torch.device("cpu"), torch.device("cpu:0"))


def spread(model: nn.Module, first: int = 2) -> nn.Module:
    """The model, dispatched: its layers from this one on are on a device of their own, as far as hooks know."""
    dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    for layer in list(layers(model).values())[first:]:
        for module in layer.modules():
            if HOOK in vars(module):
                vars(module)[HOOK].execution_device = DEVICES[1]
    return model


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """(optimized, stock) of a family, the first spread after its first layer; skips what this transformers has not."""
    stock = make(name)
    return accel.optimize(spread(copy.deepcopy(stock), first=1)), stock


def hand_another(monkeypatch, model: nn.Module) -> None:
    """Has a layer of the optimized model be given another tensor than the layer before it gave."""
    passes, handed = ChainedStep.passes, vars(model)["forward"].layers[1]

    def changed(step, layer, x, kwargs):
        return passes(step, layer, x.clone() if layer is handed else x, kwargs)

    monkeypatch.setattr(ChainedStep, "passes", changed)


def between_processes(folder: str) -> dict:
    """One of several processes that hold a stage each, as `DistributedConfig(pp_size=N)` has it: what comes of it."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    size = torch.distributed.get_world_size()
    config = DistributedConfig(pp_size=size)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config).eval()
    ids = prompt(2, 6)
    with torch.no_grad():
        wanted = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        before = snapshot(model)
        accel.optimize(model, cpu="fuse")
        got = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        told = accel.report(model).sites
        accel.restore(model)
        assert_same_state(before, snapshot(model))
    return {"wanted": wanted.tolist(), "got": got.tolist(), "told": [row for row in told if row[1] == "language model"]}
