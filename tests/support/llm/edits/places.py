"""Places in a model, and adapters put on it."""

from collections.abc import Callable

import torch
from torch import nn

from support.llm.families import layers


def first(model) -> nn.Module:
    """The first decoder layer."""
    return next(iter(layers(model).values()))


def is_matrix(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def matrices(module: nn.Module) -> dict[str, nn.Module]:
    return {name: child for name, child in module.named_modules() if is_matrix(child)}


def matrix(model, number: int = 0) -> nn.Module:
    """Of the first layer: 0 is of the queries, -1 the last of the MLP in most families."""
    return list(matrices(first(model)).values())[number]


def norm(model) -> nn.Module:
    found = (m for m in first(model).modules() if "norm" in type(m).__name__.lower() and hasattr(m, "weight"))
    return next(found)


def part(model, number: int) -> nn.Module:
    """The number-th child of the first layer that holds matrices: its attention, its MLP."""
    return [child for child in first(model).children() if matrices(child) and not is_matrix(child)][number]


def swap(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for module in list(root.modules()):
        for name, child in list(module.named_children()):
            if child is old:
                setattr(module, name, new)


def random(like: torch.Tensor, scale: float = 0.05, seed: int = 3) -> torch.Tensor:
    return scale * torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like)


def do(action: Callable) -> Callable:
    def step(model):
        action(model)

    return step


def attention(model) -> nn.Module:
    return part(model, 0)


def mlp(model) -> nn.Module:
    return part(model, 1)


def names(model) -> list[str]:
    """Of all matrices in a layer, also where some have an adapter already."""
    paths = (name.partition(".base_layer")[0] for name in matrices(first(model)) if ".lora_" not in name)
    return sorted({path.rpartition(".")[2] for path in paths})


def lora_config(model, seed: int = 0, **options):
    from peft import LoraConfig

    torch.manual_seed(seed)
    fan_in = type(matrix(model)).__name__ == "Conv1D"
    options = {"r": 4, "target_modules": names(model), "init_lora_weights": False, "task_type": "CAUSAL_LM"} | options
    return LoraConfig(fan_in_fan_out=fan_in, **options)


def put(model, config, name: str = "default"):
    """As `model.add_adapter`, which transformers 5.24 refuses with every PEFT that is out: it asks for 0.22."""
    from peft import inject_adapter_in_model

    inject_adapter_in_model(config, model, adapter_name=name)


def lora(name: str, seed: int = 0, **options) -> Callable:
    def step(model):
        config = lora_config(model, seed, **options)
        torch.manual_seed(seed)
        put(model, config, name)

    return step


def wrapped(model):
    """As peft's users do: the model they call from then on is another object."""
    from peft import get_peft_model

    config = lora_config(model)
    torch.manual_seed(0)
    return get_peft_model(model, config).eval()


def adapted(model) -> list:
    """The layers that have an adapter: asked one by one, as `put` says."""
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def merge(model) -> None:
    for module in adapted(model):
        module.merge()


def unmerge(model) -> None:
    for module in adapted(model):
        module.unmerge()


def switch(on: bool) -> Callable:
    def step(model):
        for module in adapted(model):
            module.enable_adapters(on)

    return step


def choose(name: str) -> Callable:
    def step(model):
        for module in adapted(model):
            module.set_adapter(name)

    return step


def delete(model) -> None:
    for name in list(model.peft_config):
        for module in adapted(model):
            module.delete_adapter(name)
        del model.peft_config[name]


def prefix(model):
    """Prefix tuning: peft gives the model a cache of its own making in the first call."""
    from peft import PrefixTuningConfig, get_peft_model

    torch.manual_seed(5)
    return get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
