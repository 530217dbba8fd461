"""Adapters of peft: put on, merged, taken off."""

from collections.abc import Callable

import torch

from support.llm.edits.places import first, matrices, matrix


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
