"""What users do to a language model between two calls, as a table: stock and ours go through it side by side."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from support.llm.families import layers, make


@dataclass(frozen=True)
class Change:
    """steps: functions of a model, a call after each; where one returns another model, that one is called from then on.

    reverse: how users take the change back; None where they cannot. shows: whether stock computes something else after
    the first step. slack: where rounding is coarser, how much more may differ. only: the families that can have it.
    """

    name: str
    steps: tuple[Callable, ...]
    reverse: Callable | None = None
    shows: bool = True
    slack: float = 1
    only: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


# -- where things are, by what they are --------------------------------------------------------------------------------


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


# -- adapters ----------------------------------------------------------------------------------------------------------


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


def lora(name: str, seed: int = 0, **options) -> Callable:
    def step(model):
        config = lora_config(model, seed, **options)
        torch.manual_seed(seed)
        model.add_adapter(config, adapter_name=name)

    return step


def wrapped(model):
    """As peft's users do: the model they call from then on is another object."""
    from peft import get_peft_model

    config = lora_config(model)
    torch.manual_seed(0)
    return get_peft_model(model, config).eval()


def merge(model) -> None:
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.merge()


def unmerge(model) -> None:
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.unmerge()


def delete(model) -> None:
    for name in list(model.peft_config):
        model.delete_adapter(name)


def prefix(model):
    """Prefix tuning: peft gives the model a cache of its own making in the first call."""
    from peft import PrefixTuningConfig, get_peft_model

    torch.manual_seed(5)
    return get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()


# -- weights -----------------------------------------------------------------------------------------------------------


def other_weights(model) -> None:
    model.load_state_dict({name: tensor + random(tensor) for name, tensor in model.state_dict().items()})


def assigned_weights(model) -> None:
    model.load_state_dict({name: tensor + random(tensor) for name, tensor in model.state_dict().items()}, assign=True)
    model.tie_weights()


def new_parameter(model) -> None:
    matrix(model).weight = nn.Parameter(matrix(model).weight + random(matrix(model).weight))


def new_data(model) -> None:
    matrix(model).weight.data = matrix(model).weight.data + random(matrix(model).weight)


def new_data_of_the_second(model) -> None:
    """The same Parameter at another address, behind the first of the weights that were put into one storage."""
    second = list(matrices(first(model)).values())[1]
    second.weight.data = second.weight.data + random(second.weight)


def in_place(*found: Callable) -> Callable:
    def step(model):
        for find in found:
            with torch.no_grad():
                find(model).weight.add_(random(find(model).weight, 0.3))

    return step


def new_bias(model) -> None:
    module = matrix(model)
    width = module.weight.shape[1 if type(module).__name__ == "Conv1D" else 0]
    module.bias = nn.Parameter(random(module.weight.new_empty(width), 0.3))


def through_data(model) -> None:
    """Writes that autograd does not count."""
    for module in matrices(first(model)).values():
        module.weight.data.mul_(-1)


# -- modules -----------------------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    """Something of the user's around a module of the model's."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        output = self.inner(*args, **kwargs)
        return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output


class Own(nn.Linear):
    """A subclass that computes something else."""

    def forward(self, x):
        return super().forward(x) * 1.5


def own_linear(model) -> None:
    old = matrix(model)
    new = Own(old.in_features, old.out_features, bias=old.bias is not None, device=old.weight.device)
    new.weight, new.bias = old.weight, old.bias
    swap(model, old, new)


def around(find: Callable) -> Callable:
    def step(model):
        swap(model, find(model), Doubled(find(model)))

    return step


def another_layer(model) -> None:
    """From a model of the same family with other weights."""
    swap(model, first(model), first(make_like(model, seed=9).to(model.device)))


def make_like(model, seed: int):
    from support.llm.families import BY_NAME

    return make(BY_NAME[model.family], seed=seed)


def fewer_layers(model) -> None:
    path = next(iter(layers(model))).rpartition(".")[0]
    del model.get_submodule(path)[-1]
    model.config.num_hidden_layers -= 1


def layers_in_another_order(model) -> None:
    """The weights change places; the layers know their number, and keep it."""
    one, other = list(layers(model).values())[:2]
    state = {name: tensor.clone() for name, tensor in one.state_dict().items()}
    one.load_state_dict(other.state_dict())
    other.load_state_dict(state)


def own_forward(find: Callable) -> Callable:
    """Someone replaces the forward of an instance, with the one that is there inside."""

    def step(model):
        module = find(model)

        def forward(*args, inner=module.forward, **kwargs):
            output = inner(*args, **kwargs)
            return (-output[0], *output[1:]) if isinstance(output, tuple) else -output

        module.forward = forward

    return step


def hook(find: Callable, before: bool = False) -> Callable:
    """Kept on the model, to be removed."""

    def after_it(module, args, output):
        if hasattr(output, "last_hidden_state"):
            output.last_hidden_state = 1.5 * output.last_hidden_state
            return output
        return (1.5 * output[0], *output[1:]) if isinstance(output, tuple) else 1.5 * output

    def before_it(module, args, kwargs):
        args = tuple(1.5 * x if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args)
        return args, {k: 1.5 * v if k == "hidden_states" else v for k, v in kwargs.items()}

    def step(model):
        module = find(model)
        if before:
            model.handle = module.register_forward_pre_hook(before_it, with_kwargs=True)
        else:
            model.handle = module.register_forward_hook(after_it)

    return step


def unhook(model) -> None:
    model.handle.remove()
    del model.handle


def pruned(model) -> None:
    from torch.nn.utils import prune

    prune.l1_unstructured(matrix(model), "weight", 0.5)


def parametrized(model) -> None:
    from torch.nn.utils import parametrizations

    parametrizations.weight_norm(matrix(model))
    with torch.no_grad():
        matrix(model).parametrizations.weight.original0.mul_(1.3)


def quantized(model) -> None:
    """As quantizing libraries do: another kind of module in a linear's place."""
    old = matrix(model, -1)
    scale = old.weight.detach().abs().amax() / 7

    class Rough(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", (old.weight.detach() / scale).round().to(torch.int8))
            self.bias = old.bias

        def forward(self, x):
            return nn.functional.linear(x, self.weight.to(x.dtype) * scale, self.bias)

    swap(model, old, Rough())


def more_words(model) -> None:
    torch.manual_seed(0)
    model.resize_token_embeddings(120, mean_resizing=False)


def other_head(model) -> None:
    old = model.get_output_embeddings()
    new = nn.Linear(old.in_features, old.out_features, bias=True)
    torch.manual_seed(6)
    nn.init.normal_(new.weight, std=0.3), nn.init.normal_(new.bias)
    model.set_output_embeddings(new.to(old.weight))


def other_words(model) -> None:
    new = nn.Embedding.from_pretrained(model.get_input_embeddings().weight.detach() * -1.3)
    model.set_input_embeddings(new)


def setting(find: Callable, name: str, value: object) -> Callable:
    def step(model):
        module = find(model)
        assert hasattr(module, name), name
        setattr(module, name, value)

    return step


def config(name: str, value: object) -> Callable:
    return lambda model: setattr(model.config, name, value)


def attention(model) -> nn.Module:
    return part(model, 0)


def mlp(model) -> nn.Module:
    return part(model, 1)


LLAMA = ("llama",)
LLAMA_LIKE = ("llama", "gpt-neox")  # made of nn.Linear
CHANGES = (
    Change(
        "lora",
        (lora("style"), do(lambda m: m.disable_adapters()), do(lambda m: m.enable_adapters())),
        reverse=delete,
    ),
    Change("two-loras", (lora("style"), lora("tone", 1), do(lambda m: m.set_adapter("style"))), reverse=delete),
    Change("lora-merged", (lora("style"), do(merge), do(unmerge)), reverse=delete),
    Change("lora-with-dropout-and-bias", (lora("style", lora_dropout=0.5, use_rslora=True),), reverse=delete),
    Change("dora", (lora("style", use_dora=True),), reverse=delete, only=LLAMA_LIKE),
    Change("peft-model", (wrapped, lambda m: m.merge_and_unload())),
    Change("peft-model-taken-off", (wrapped, lambda m: m.unload())),
    Change("prefix-tuning", (prefix,)),
    Change("other-weights", (do(other_weights), do(other_weights))),
    Change("assigned-weights", (do(assigned_weights),)),
    Change("new-parameter", (do(new_parameter),)),
    Change("new-data", (do(new_data),)),
    Change("new-data-of-the-second", (do(new_data_of_the_second),), only=LLAMA_LIKE),
    Change("through-data", (do(through_data),), reverse=through_data),
    Change("matrix-in-place", (in_place(matrix), in_place(lambda m: matrix(m, -1)))),
    Change("norm-in-place", (in_place(norm),)),
    Change("head-in-place", (in_place(lambda m: m.get_output_embeddings()),)),
    Change("words-in-place", (in_place(lambda m: m.get_input_embeddings()),)),
    Change("new-bias", (do(new_bias),)),
    Change("double", (do(lambda m: m.double()),), reverse=lambda m: m.float(), shows=False),
    Change("bfloat16", (do(lambda m: m.bfloat16()),), shows=False, slack=2**12),
    Change("own-linear", (do(own_linear),), only=LLAMA_LIKE),
    Change("quantized", (do(quantized),), only=LLAMA_LIKE),
    Change("around-a-matrix", (around(matrix),)),
    Change("around-the-attention", (around(attention),)),
    Change("around-the-mlp", (around(mlp),)),
    Change("around-a-norm", (around(norm),)),
    Change("another-layer", (do(another_layer),)),
    Change("fewer-layers", (do(fewer_layers),)),
    Change("layers-in-another-order", (do(layers_in_another_order),)),
    *(
        Change(f"own-forward-of-{name}", (own_forward(find),))
        for name, find in {"a-matrix": matrix, "attention": attention, "mlp": mlp, "norm": norm}.items()
    ),
    *(
        Change(f"hook-on-{name}", (hook(find), do(unhook)))
        for name, find in {
            "the-model": lambda m: m.get_submodule(m.base_model_prefix),
            "a-layer": first,
            "the-attention": attention,
            "the-mlp": mlp,
            "a-norm": norm,
            "a-matrix": matrix,
            "the-words": lambda m: m.get_input_embeddings(),
            "the-head": lambda m: m.get_output_embeddings(),
        }.items()
    ),
    *(
        Change(f"hook-before-{name}", (hook(find, before=True), do(unhook)))
        for name, find in {"a-layer": first, "the-mlp": mlp, "a-matrix": lambda m: matrix(m, -1)}.items()
    ),
    Change("pruned", (do(pruned),)),
    Change("parametrized", (do(parametrized),), only=LLAMA_LIKE),
    Change("more-words", (do(more_words),), shows=False),
    Change("other-head", (do(other_head),)),
    Change("other-words", (do(other_words),)),
    Change("other-scaling", (setting(attention, "scaling", 0.7),), only=LLAMA_LIKE),
    Change("other-eps", (setting(norm, "variance_epsilon", 3.0),), only=LLAMA),
    Change("other-activation", (setting(mlp, "act_fn", nn.ReLU()),), only=LLAMA),
    Change(
        "other-attention",
        (do(lambda m: m.set_attn_implementation("eager")),),
        reverse=lambda m: m.set_attn_implementation("sdpa"),
        shows=False,
    ),
    Change("no-cache", (config("use_cache", False),), reverse=config("use_cache", True), shows=False),
    Change(
        "hidden-states-always",
        (config("output_hidden_states", True),),
        reverse=config("output_hidden_states", False),
        shows=False,
    ),
    Change("trained", (do(lambda m: m.train()), do(lambda m: m.eval())), shows=False),
    Change("checkpointing", (do(lambda m: m.gradient_checkpointing_enable()),), shows=False),
    Change("frozen", (do(lambda m: m.requires_grad_(False)),), shows=False),
)
