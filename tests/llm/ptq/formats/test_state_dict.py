"""Models that came quantized have the state_dict of stock while they are optimized: keys, order and bits."""

import copy
import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import accel
from support.bits import as_elsewhere, float8, four_bit
from support.diffusion.library_formats import FORMATS
from support.everything import always
from support.llm.families import layers, make
from support.llm.outputs import ran_fast, same
from support.llm.prequantized.models import MAKERS, compressed, prequantized
from support.llm.quantized import held_by, logits

LAYOUTS = ("int8", "int8 bytes", "int8-asym bytes", "int4-g32", "int4-g32 3", "fp8")  # of compressed-tensors
IN_PLACE = {
    "fp8 blocks": lambda linear: float8(linear, (32, 32)),
    "nf4": four_bit,
    "nf4 nested": lambda linear: four_bit(linear, nested=True),
}
LIBRARIES = [name for name in FORMATS if name.startswith(("torchao", "quanto"))]


def in_format(kind, folders, seed=1):
    """A tiny model in this format, of other numbers by another seed."""
    if kind in MAKERS:
        return prequantized(kind, "llama-biases", seed=seed, intermediate_size=160)[0]
    if kind in LAYOUTS:
        model = compressed(folders("llama-biases", kind))
        for one in model.state_dict().values() if seed > 1 else ():
            if one.dim() > 1:
                one.copy_(one.view(torch.uint8).flip(0).view(one.dtype) if one.dtype.itemsize == 1 else one.flip(0))
        return model
    if kind == "mxfp4":
        from llm.ptq.experts.test_mxfp4 import arrived

        return arrived(seed=seed)
    model = make("llama-biases", seed=seed, intermediate_size=160)
    if kind in FORMATS:
        FORMATS[kind](model.model.layers)
    for layer in layers(model).values() if kind in IN_PLACE else ():
        for where, linear in list(layer.named_modules()):
            if type(linear) is nn.Linear:
                layer.set_submodule(where, IN_PLACE[kind](linear))
    return model


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


def equal(ours, theirs):
    assert list(ours) == list(theirs)
    for name, mine in ours.items():
        other = theirs[name]
        if not isinstance(mine, torch.Tensor):
            assert mine == other
            continue
        assert (mine.dtype, mine.shape, type(mine)) == (other.dtype, other.shape, type(other)), name
        inside = mine.__tensor_flatten__()[0] if hasattr(mine, "__tensor_flatten__") else ()
        pairs = [[getattr(one, part) for one in (mine, other)] for part in inside] or [(mine, other)]
        assert all(torch.equal(*map(bits, pair)) for pair in pairs), name


def loaded(models, other, **given):
    """The models, with the state of another."""
    state = {name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in other.state_dict().items()}
    for model in models:
        model.load_state_dict(state, **given)
    return models


@pytest.mark.parametrize("kind", always([*MAKERS, *LAYOUTS, "mxfp4"], "awq", "gptq-8-v2"))
@pytest.mark.share(6)
@pytest.mark.turns(2)
def test_of_what_is_repacked(kind, folders, tmp_path):
    stock, ours, other = (in_format(kind, folders, seed) for seed in (1, 1, 2))
    accel.optimize(ours)
    assert any(vars(one).get("arrived") for one in ours.modules())
    equal(ours.state_dict(), stock.state_dict())
    for copied in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)))[: 2 - (kind in LAYOUTS)]:
        equal(copied(ours).state_dict(), stock.state_dict())
    for model, name in ((ours, "ours"), (stock, "stock")):
        model.save_pretrained(tmp_path / name)
    equal(*(load_file(tmp_path / name / "model.safetensors") for name in ("ours", "stock")))
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "stock")]
    assert configs[0] == configs[1]
    loaded((ours, stock), other)
    equal(ours.state_dict(), other.state_dict())
    for model in (ours, stock):
        model.to(torch.bfloat16).to(torch.float32)  # which rounds a library's scales
    wanted = {name: one.clone() for name, one in stock.state_dict().items()}
    equal(ours.state_dict(), wanted)
    if kind == "bitsandbytes":  # whose own products round their inputs
        accel.optimize(stock)
    same(logits(ours), logits(stock))
    ran_fast(ours)
    accel.restore(ours)
    equal(ours.state_dict(), wanted)


def test_of_several_threads_at_once(folders):
    stock, ours = in_format("gptq", folders), accel.optimize(in_format("gptq", folders))
    wanted, beside = stock.state_dict(), threading.Barrier(3)

    def read(_):
        beside.wait()
        return [ours.state_dict() for _ in range(8)]

    with ThreadPoolExecutor(3) as pool:
        found = [one for many in pool.map(read, range(3)) for one in many]
    loaded((ours,), in_format("gptq", folders, 2), assign=True)  # which leaves tensors of before as they are
    for one in found:
        equal(one, wanted)


@pytest.mark.parametrize("kind", [*IN_PLACE, *LIBRARIES])
def test_of_what_is_read_as_it_lies(kind, folders, monkeypatch):
    as_elsewhere(monkeypatch)
    stock, ours, other = (in_format(kind, folders, seed) for seed in (1, 1, 2))
    accel.optimize(ours)
    equal(ours.state_dict(), stock.state_dict())
    loaded((ours, stock), other, strict=not kind.startswith("nf4"))  # whose own state it refuses
    equal(ours.state_dict(), stock.state_dict())
    accel.restore(ours)
    equal(ours.state_dict(), stock.state_dict())


def test_bitsandbytes_writes_the_model_out(tmp_path):
    pytest.importorskip("bitsandbytes")
    make("llama-biases").save_pretrained(tmp_path)
    given = {"dtype": torch.float32, "quantization_config": BitsAndBytesConfig(load_in_8bit=True), "device_map": "cpu"}
    model, stock = (AutoModelForCausalLM.from_pretrained(tmp_path, **given).eval() for _ in range(2))
    logits(stock)
    accel.optimize(model)
    assert held_by(model)
    for one in (model, stock):
        one.dequantize()
    assert not held_by(model)
    same(logits(model), logits(stock))
    ran_fast(model)
    assert vars(accel.restore(model)).keys() == vars(stock).keys()
    same(logits(model), logits(stock), 0)


@pytest.mark.parametrize(("kind", "told"), [("gptq", "GPTQ"), ("bitsandbytes", "bitsandbytes int8")])
def test_it_is_not_quantized_again(kind, told):
    with pytest.raises(ValueError, match=rf"model\.layers\.0\.self_attn\.q_proj: is {told} already"):
        accel.quantize(prequantized(kind)[0], "int8")
