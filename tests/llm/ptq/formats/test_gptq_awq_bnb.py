"""Models that bitsandbytes makes, and layers as GPTQModel packs our rounding, where these packages are installed.

Stand-ins are tested elsewhere. No model that GPTQModel has quantized and saved is loaded here.
"""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import accel
from accel.quantization.rounding import round_to_nearest
from accel.quantization.scheme import Scheme
from support.llm.families import layers, make, padded
from support.llm.outputs import generate, same
from support.llm.quantized import held_by, logits

SIZES = {"intermediate_size": 128}  # which its 4 bits divide


def rows(model) -> dict[str, str]:
    return {path: reason for path, rule, _, reason in accel.report(model).sites if rule == "weights"}


@pytest.fixture(scope="module")
def from_bitsandbytes(tmp_path_factory):
    """By the bits: what transformers makes of a folder."""
    pytest.importorskip("bitsandbytes")
    folder = tmp_path_factory.mktemp("plain")
    make("llama-biases", **SIZES).save_pretrained(folder)

    def load(bits: int):
        asked = BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4)
        return AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=asked, dtype=torch.float32, device_map="cpu"
        ).eval()

    return load


@pytest.mark.parametrize("called", [False, True])
def test_eight_bits_of_bitsandbytes_are_repacked_and_given_back(called, from_bitsandbytes):
    model, twin, fresh = from_bitsandbytes(8), make("llama-biases", **SIZES), from_bitsandbytes(8)
    found = {}
    for path, layer in layers(model).items():
        for where, linear in layer.named_modules():
            if hasattr(linear, "weight") and linear.weight.dtype == torch.int8:
                values = linear.weight.data.float() * linear.weight.SCB[:, None] / 127
                twin.get_submodule(f"{path}.{where}").weight.data = values
                found[f"{path}.{where}"] = linear
    assert len(found) == 14
    wanted = logits(fresh)["logits"]
    if called:
        assert torch.equal(logits(model)["logits"], wanted)
    accel.optimize(model)
    assert rows(model).keys() == found.keys() and len(held_by(model)) == 14
    assert all("int8 by row, arrived as bitsandbytes int8" in reason for reason in rows(model).values())
    same(generate(model, *padded()), generate(twin, *padded()))
    assert accel.verify(model).passed
    accel.restore(model)
    assert all(model.get_submodule(path) is linear for path, linear in found.items())
    assert torch.equal(logits(model)["logits"], wanted)


def test_four_bits_of_bitsandbytes_are_left_alone_and_told(from_bitsandbytes):
    model, stock = from_bitsandbytes(4), from_bitsandbytes(4)
    accel.optimize(model)
    assert len(rows(model)) == 14 and not held_by(model)
    assert all("entries of a table" in reason for reason in rows(model).values())
    same(generate(model, *padded()), generate(stock, *padded()))


def packed(kind: type, linear: nn.Linear, rounded, scrambled: bool) -> nn.Module:
    """As GPTQModel packs it. scrambled: the groups of its columns are in an order of their own."""
    n, k = rounded.shape
    made = kind(
        bits=4, group_size=rounded.group, sym=False, desc_act=scrambled, in_features=k, out_features=n,
        bias=linear.bias is not None, pack_dtype=torch.int32, register_buffers=True,
    )  # fmt: skip
    plain, groups = copy.deepcopy(linear).half(), torch.arange(k) // rounded.group
    plain.weight.data = rounded.dequantized(torch.float16)
    if scrambled:
        order = torch.randperm(k)
        plain.weight.data, groups = plain.weight.data[:, order].contiguous(), groups[order]
    made.pack(linear=plain, scales=rounded.scales, zeros=rounded.zeros.half() + 8, g_idx=groups)
    made.post_init()
    return made.eval()


@pytest.mark.parametrize(("module", "name"), [("torch", "TorchLinear"), ("torch_awq", "AwqTorchLinear")])
@pytest.mark.parametrize("scrambled", [False, True])
def test_four_bits_of_gptqmodel(module, name, scrambled):
    package = pytest.importorskip(f"gptqmodel.nn_modules.qlinear.{module}")
    if scrambled and module != "torch":
        pytest.skip("AWQ's columns are always in order")
    model = make("llama", torch.float16, **SIZES)
    twin, count = copy.deepcopy(model), 0
    for path, layer in layers(model).items():
        for where, linear in list(layer.named_modules()):
            if type(linear) is nn.Linear:
                rounded = round_to_nearest(linear.weight, Scheme.parse("int4-g32-asym"))
                layer.set_submodule(where, packed(getattr(package, name), linear, rounded, scrambled))
                twin.get_submodule(f"{path}.{where}").weight.data = rounded.dequantized(torch.float16)
                count += 1
    with torch.no_grad():
        before = logits(model)["logits"]
        accel.optimize(model)
        if scrambled:
            assert len(rows(model)) == count and all("act-order" in reason for reason in rows(model).values())
            assert not held_by(model)
        else:
            assert len(held_by(model)) == count
            same(logits(model), logits(twin), share=5e-3)  # of float16, whose last bits choose between near words
        accel.restore(model)
        assert torch.equal(logits(model)["logits"], before)
