"""`torch.set_default_device`, as many scripts begin: tensors of our own are made where we say.

The default device is "meta", whose tensors have no values, so that one made there by mistake is seen.
"""

import ast
import copy
from contextlib import contextmanager

import pytest
import torch

import accel
from support.diffusion.tiny_models import make_unet, make_vae, unet_inputs
from support.llm.families import make, prompt
from tests.core.test_package import ACCEL, KERNELS, every_node, files, label

FACTORIES = {"arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint"}
FACTORIES |= {"randn", "randperm", "tensor", "zeros"}


@contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def decode(model):
    return model.generate(prompt(2, 5), max_new_tokens=6, do_sample=False, pad_token_id=0)


def unet_call(model):
    return model(**unet_inputs(model)).sample


def vae_call(model):
    return model(torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)).sample


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("model", "options", "call"),
    [
        (lambda: make("llama"), {}, decode),
        (lambda: make("bloom"), {}, decode),
        (lambda: make("qwen3-moe"), {}, decode),
        (lambda: make("llama"), {"weights": "int8", "kv_cache": "int8"}, decode),
        (make_unet, {}, unet_call),
        (make_vae, {}, vae_call),
    ],
    ids=["llama", "alibi", "experts", "int8", "unet", "vae"],
)
@pytest.mark.turns(2)
def test_models_are_optimized_alike(model, options, call):
    stock = model()
    ours, plain = copy.deepcopy(stock), accel.optimize(copy.deepcopy(stock), cpu="fuse", **options)
    with default_device("meta"):
        accel.optimize(ours, cpu="fuse", **options)
    wanted = [row[:3] for row in accel.report(plain).sites]
    assert [row[:3] for row in accel.report(ours).sites] == wanted
    assert any(status == "patched" for *_, status in wanted)
    assert torch.equal(call(ours), call(plain))


def without_device(path):
    """Calls of torch's factories that leave the device to torch."""
    calls = [node for node in every_node(path) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in FACTORIES]
    made = [call for call in named if ast.unparse(call.func) == f"torch.{call.func.attr}"]
    return [ast.unparse(call) for call in made if not {keyword.arg for keyword in call.keywords} & {"device", None}]


def test_factories_name_their_device():
    apart = [ACCEL / name for name in ("bench", "demo", "commands")]  # whose scripts are as a user's
    paths = [path for path in files(ACCEL, KERNELS) if not any(map(path.is_relative_to, apart))]
    assert not {label(path): found for path in paths if (found := without_device(path))}
