"""What is done to adapters and to the model they are on: each change by one draw of random numbers."""

import random
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from accel.libraries.adapters import BASE, DOWN

FLOATS = (torch.float32, torch.bfloat16)
RANKS = (2, 4, 8, 16, 33, 64, 130)


def adapted(model: nn.Module) -> list[Any]:
    return [one for one in model.modules() if BASE in one._modules]


def names_of(model: nn.Module) -> list[str]:
    return sorted({name for layer in adapted(model) for name in layer._modules[DOWN]})


def load(model: Any, draw: random.Random) -> None:
    name = f"adapter {draw.randrange(5)}"
    if name in names_of(model):
        return
    found = {path.replace(f".{BASE}", "").rpartition(".")[2] for path, one in model.named_modules() if is_base(one)}
    kinds = sorted(found - {"lm_head"})
    targets = kinds if draw.random() < 0.5 else draw.sample(kinds, max(1, len(kinds) // 2))
    floats = all(one.is_floating_point() for one in model.parameters())  # of which alone peft has norms for DoRA
    config = LoraConfig(
        r=draw.choice(RANKS), lora_alpha=draw.choice((2, 16)), target_modules=targets, init_lora_weights=False,
        use_rslora=draw.random() < 0.2, use_dora=draw.random() < 0.05 and floats, lora_dropout=draw.choice((0, 0, 0.1)),
        fan_in_fan_out=any(type(one).__name__ == "Conv1D" for one in model.modules()),
    )  # fmt: skip
    inject_adapter_in_model(config, model, adapter_name=name)


def is_base(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def switch(model: Any, draw: random.Random) -> None:
    names = names_of(model)
    chosen = draw.sample(names, draw.randint(1, len(names))) if names else []
    for layer in adapted(model):
        layer.set_adapter(chosen)


def scale(model: Any, draw: random.Random) -> None:
    factors = {name: draw.choice((0.0, 0.3, -0.7, 1.3)) for name in names_of(model)}
    for layer in adapted(model):
        for name in layer._modules[DOWN]:
            layer.set_scale(name, factors[name])


def merge(model: Any, draw: random.Random) -> None:
    for layer in adapted(model):
        if layer.merged:
            layer.unmerge()
        else:
            layer.merge()


def turn(model: Any, draw: random.Random) -> None:
    on = draw.random() < 0.6
    for layer in adapted(model):
        layer.enable_adapters(on)


def train(model: Any, draw: random.Random) -> None:
    factor, anew = draw.choice((-1.0, 0.7, 1.2)), draw.random() < 0.3
    for path, one in model.named_parameters():
        if "lora_" in path:
            one.data = one.data * factor if anew else one.data.mul_(factor)


def train_base(model: Any, draw: random.Random) -> None:
    found = [one for path, one in model.named_parameters() if "lora_" not in path and one.dtype in FLOATS]
    one, factor = draw.choice(found), 1 + draw.uniform(-0.1, 0.1)
    one.data = one.data * factor if draw.random() < 0.5 else one.data.mul_(factor)


def delete(model: Any, draw: random.Random) -> None:
    names = names_of(model)
    name = draw.choice(names) if names else None
    for layer in adapted(model):
        if name in layer._modules[DOWN]:
            layer.delete_adapter(name)
    getattr(model, "peft_config", {}).pop(name, None)


def unload(model: Any, draw: random.Random) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and BASE in child._modules:
                parent._modules[name] = child.get_base_layer()
    vars(model).pop("peft_config", None)
    vars(model).pop("_hf_peft_config_loaded", None)


def dtype(model: Any, draw: random.Random) -> None:
    half = next(model.parameters()).dtype == torch.float32
    model.to(torch.bfloat16 if half else torch.float32)
    if half and "moe" in type(model).__name__.lower():  # two nearly equal experts would be told apart by rounding
        model.to(torch.float32)


def move(model: Any, draw: random.Random) -> None:
    """As to another device and back: all weights lie elsewhere."""
    model._apply(lambda one: one.clone())


def save(model: Any, draw: random.Random) -> None:
    """And load what was saved."""
    model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()})


CHANGES = (load, load, load, switch, switch, scale, merge, turn, train, train_base, delete, unload, dtype, move, save)
