"""Models that came quantized have the state_dict of stock while they are optimized: keys, order and bits."""

import copy
import pickle

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import accel
from support.bits import as_elsewhere, float8, four_bit
from support.diffusion.library_formats import FORMATS
from support.llm.families import layers, make, padded
from support.llm.outputs import generate, ran_fast, same
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


def equal(ours, theirs):
    assert list(ours) == list(theirs)
    for name, mine in ours.items():
        other = theirs[name]
        if not isinstance(other, torch.Tensor):
            assert mine == other
            continue
        assert (mine.dtype, mine.shape, type(mine)) == (other.dtype, other.shape, type(other)), name
        if hasattr(mine, "__tensor_flatten__"):
            names, _ = mine.__tensor_flatten__()
            assert all(torch.equal(getattr(mine, one), getattr(other, one)) for one in names)
        else:
            assert torch.equal(mine.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("kind", [*MAKERS, *LAYOUTS, *IN_PLACE, *LIBRARIES, "mxfp4"])
def test_it_is_that_of_stock(kind, folders, tmp_path, monkeypatch):
    if kind.startswith("nf4"):
        as_elsewhere(monkeypatch)
    stock, ours, other = (in_format(kind, folders, seed) for seed in (1, 1, 2))
    accel.optimize(ours)
    equal(ours.state_dict(), stock.state_dict())
    for one in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        equal(one.state_dict(), stock.state_dict())
    for model, name in ((ours, "ours"), (stock, "stock")):
        model.save_pretrained(tmp_path / name)
    equal(*(load_file(tmp_path / name / "model.safetensors") for name in ("ours", "stock")))
    given = {name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in other.state_dict().items()}
    for model in (ours, stock):
        model.load_state_dict(given)
    equal(ours.state_dict(), given)
    ids, mask = padded()
    same(generate(ours, ids, mask), generate(copy.deepcopy(stock), ids, mask))
    ran_fast(ours)
    for model in (ours, stock):
        model.to(torch.bfloat16).float()
    equal(ours.state_dict(), stock.state_dict())
    accel.restore(ours)
    equal(ours.state_dict(), stock.state_dict())
