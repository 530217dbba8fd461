"""Layers lent to a device one at a time while they are quantized: the same results, and one layer there at most."""

import copy
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import accel
from accel.llm.ptq import calibrate as calibration
from accel.llm.ptq import run
from accel.llm.ptq.calibration import layer_inputs
from accel.llm.ptq.calibration.layer_inputs import lent, moved
from accel.quantization.scheme import Scheme
from support.llm.families import make, prompt
from support.llm.quantized import logits

CPU = torch.device("cpu")
DATA = [prompt(2, 24, seed) for seed in range(3)]
WAYS = (("int8", "rtn", None), ("int4-g32", "gptq", None), ("int4-g32", "awq", None), ("int8", "smoothquant", None),
        ("int8", "smoothquant", "int8-static"), ("int4-g32-head", "rtn", None))  # fmt: skip


@pytest.fixture
def loans(monkeypatch):
    """The layers in the order in which they were lent; two at once are an error."""
    out, seen = [], []

    @contextmanager
    def watched(module, device, changed=False):
        assert device is None or out == []
        out.extend([module] if device else [])
        seen.extend(out)
        with lent(module, device, changed):
            yield
        out.clear()

    for user in (calibration, layer_inputs):
        monkeypatch.setattr(user, "lent", watched)
    return seen


@pytest.mark.parametrize(("scheme", "method", "activations"), WAYS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.share(5)
def test_the_same_comes_of_it(name, scheme, method, activations, loans):
    stock = make(name)
    given = {"calibration": None if method == "rtn" else DATA, "method": method, "activations": activations}
    wanted = accel.quantize(copy.deepcopy(stock), scheme, **given)
    assert loans == []
    ours = accel.quantize(copy.deepcopy(stock), scheme, device="cpu", **given)
    for mine, theirs in zip(ours.state_dict().items(), wanted.state_dict().items(), strict=True):
        assert mine[0] == theirs[0] and torch.equal(mine[1], theirs[1]), mine[0]
    assert torch.equal(logits(ours)["logits"], logits(wanted)["logits"])
    assert len(loans) >= stock.config.num_hidden_layers


def between(model):
    """Something is done between the first layer and the second, which therefore gets what a run through both gives."""
    second = model.model.layers[1]
    kind = type(second)
    second.__class__ = type(
        "Between", (kind,), {"__call__": lambda self, x, **more: kind.__call__(self, 2 * x, **more)}
    )
    return model


@pytest.mark.parametrize("method", ["gptq", "smoothquant"])
def test_what_is_rounded_is_written_only_where_later_layers_need_it(method):
    """Until all is done: nothing is copied of what the model holds, and an error has nothing to put back."""
    scheme = Scheme.parse("int8")
    data = [{"input_ids": ids} for ids in DATA]
    for make_it, written in ((make, False), (lambda name: between(make(name)), True)):
        model, wanted = make_it("llama"), make_it("llama")
        before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
        ours = list(calibration.quantize_layers(model, scheme, method, data, device=CPU))
        theirs = list(calibration.quantize_layers(wanted, scheme, method, data))
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.weights.keys() == other.weights.keys() and mine.changed.keys() == other.changed.keys()
            for path, quantized in mine.weights.items():
                assert torch.equal(quantized.data, other.weights[path].data)
        same = [p.data_ptr() == before[name][0] for name, p in model.named_parameters()]
        assert all(same) != written
        assert all(torch.equal(p, before[name][1]) for name, p in model.named_parameters()) != written


@pytest.mark.parametrize("make_it", [make, lambda name: between(make(name))], ids=["as-it-is", "between"])
def test_an_interrupted_run_leaves_the_model_as_it_was(make_it, monkeypatch):
    model = make_it("llama")
    before = {name: p.clone() for name, p in model.named_parameters()}

    def stopped(*given):
        yield next(real(*given))
        raise KeyboardInterrupt

    real = run.quantize_layers
    monkeypatch.setattr(run, "quantize_layers", stopped)
    with pytest.raises(KeyboardInterrupt):
        accel.quantize(model, "int8", DATA, method="smoothquant", device="cpu")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


class Apart(TorchDispatchMode):
    """Notes operations that take tensors of both devices, where a single one has to stand for two.

    there: the storages on the device; here: the model's own. What is computed from either joins it.
    """

    def __init__(self, model):
        super().__init__()
        self.here, self.there, self.mixed = set(), set(), []
        self.add(self.here, (*model.parameters(), *model.buffers()))

    def add(self, place: set, tensors) -> None:
        storages = (tensor.untyped_storage() for tensor in tensors)
        addresses = {storage.data_ptr() for storage in storages if storage.nbytes()}
        self.here -= addresses
        self.there -= addresses
        place |= addresses

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = [one for one in tree_leaves((args, kwargs or {})) if isinstance(one, torch.Tensor) and one.dim()]
        places = {one.untyped_storage().data_ptr() for one in given}
        if places & self.there and places & self.here:
            self.mixed.append(f"{function} of {[tuple(one.shape) for one in given]}")
        found = function(*args, **(kwargs or {}))
        made = [one for one in tree_leaves(found) if isinstance(one, torch.Tensor)]
        of_neither = set()  # and no longer of the one whose storage had that address before
        self.add(self.there if places & self.there else self.here if places & self.here else of_neither, made)
        return found


@pytest.mark.parametrize(("scheme", "method", "activations"), WAYS[:5])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.share(6)
def test_a_layer_and_what_it_is_given_are_on_one_device(name, scheme, method, activations, monkeypatch):
    """Without a second device: what is lent or moved is a copy, and copies and originals never meet."""
    model, there = make(name), torch.device("cpu", 0)
    apart = Apart(model)

    @contextmanager
    def tagged(module, device, changed=False):
        with lent(module, device, changed):
            apart.add(apart.there, (*module.parameters(), *module.buffers()))
            yield
        apart.add(apart.here, (*module.parameters(), *module.buffers()))

    def copied(value, device):
        if device is None:
            return value
        value = tree_map_only(torch.Tensor, torch.clone, value)
        tensors = [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]
        apart.add(apart.there if device == there else apart.here, tensors)
        return value

    for user in (calibration, layer_inputs):
        monkeypatch.setattr(user, "lent", tagged)
        monkeypatch.setattr(user, "moved", copied)
    data = [] if method == "rtn" else [{"input_ids": ids} for ids in DATA]
    asked = replace(Scheme.parse(scheme), activations=activations)
    with apart:
        results = list(calibration.quantize_layers(model, asked, method, data, device=there))
    assert len(results) == model.config.num_hidden_layers and apart.there and not apart.mixed[:3]
    tensors = [one for one in tree_leaves([tuple(result) for result in results]) if isinstance(one, torch.Tensor)]
    assert tensors and apart.there.isdisjoint(one.untyped_storage().data_ptr() for one in tensors)


def test_what_goes_wrong_leaves_the_model_as_it_was(loans):
    model = make("llama")
    wanted = logits(model)["logits"]
    torch.nn.init.constant_(model.model.layers[1].mlp.down_proj.weight[0, :1], float("inf"))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="NaN or Inf"):
        accel.quantize(model, "int4-g32", DATA, method="gptq", device="cpu")
    assert all(torch.equal(now, before[name]) for name, now in model.state_dict().items())
    assert not torch.equal(logits(model)["logits"], wanted)


@pytest.mark.parametrize("device", ["nowhere", 3.5, "cuda:99"])
def test_a_device_that_is_none_is_an_error_before_anything_is_changed(device):
    model = make("llama")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=f"device={device!r}"):
        accel.quantize(model, "int8", device=device)
    assert all(torch.equal(now, before[name]) for name, now in model.state_dict().items())


def test_after_a_loan_the_memory_is_the_modules_own():
    layer = torch.nn.BatchNorm1d(3)
    layer.twin = torch.nn.Linear(3, 3)
    layer.twin.weight = layer.weight
    before = [(one, one.data_ptr(), one.clone()) for one in (*layer.parameters(), *layer.buffers())]
    for error in (None, KeyError):
        with suppress(KeyError), lent(layer, CPU):
            for one, place, _ in before:
                assert one.data_ptr() != place
                one.detach().fill_(5)
            if error is not None:
                raise error
        for one, place, values in before:
            assert one.data_ptr() == place and torch.equal(one, values)
    with lent(layer, CPU, changed=True):
        layer.weight.detach().fill_(7)
    assert layer.twin.weight.tolist() == [7.0] * 3 and torch.equal(layer.bias, before[1][2])
    with lent(layer, None):
        assert layer.weight.tolist() == [7.0] * 3


def test_all_tensors_of_a_call_move():
    value = ((torch.ones(2), None), {"x": [torch.ones(3), "word"]})
    (first, none), named = moved(value, torch.device("meta"))
    assert first.is_meta and none is None and named["x"][0].is_meta and named["x"][1] == "word"
    assert moved(value, None) is value
