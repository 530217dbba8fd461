"""Modules, hooks, forwards and settings replaced."""

from collections.abc import Callable

import torch
from torch import nn

from support.llm.edits.places import first, matrix, swap
from support.llm.families import layers, make


class Doubled(nn.Module):
    """Something of the user's around a module of the model's."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        output = self.inner(*args, **kwargs)
        return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output


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


def config(name: str, value: object) -> Callable:
    return lambda model: setattr(model.config, name, value)


def llama_with(change):
    """A llama whose second layer is changed."""
    model = make("llama")
    change(model.model.layers[1])
    return model
