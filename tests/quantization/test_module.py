"""The module that holds a quantized weight: what it computes, how it travels, what code sees that looks at it."""

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from accel.cuda_graphs.fingerprint import Fingerprint
from accel.options import SCHEMES as NAMES
from accel.quantization.module import QuantizedLinear, dequantizing
from accel.quantization.rounding import round_to_nearest
from accel.quantization.scheme import Scheme

INPUTS, OUTPUTS = 128, 24


def linear(weights: str = "int4-g32-asym", bias: bool = True, dtype: torch.dtype = torch.float32) -> QuantizedLinear:
    torch.manual_seed(0)
    plain = nn.Linear(INPUTS, OUTPUTS, bias, dtype=dtype)
    scheme = Scheme.parse(weights)
    return QuantizedLinear(round_to_nearest(plain.weight, scheme), plain.bias, dtype, scheme)


def x(rows: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, 2, INPUTS, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("weights", NAMES)
def test_it_multiplies_with_the_weight_it_shows(weights, bias, dtype):
    module = linear(weights, bias, dtype)
    assert module.weight.shape == (OUTPUTS, INPUTS) and module.weight.dtype == dtype
    wanted = F.linear(x(dtype=dtype), module.weight, module.bias)
    assert type(wanted) is torch.Tensor
    with torch.no_grad():
        found = module(x(dtype=dtype))
        if weights == "int8" and dtype == torch.bfloat16:  # by its numbers, not by the weight rounded to bf16
            shift = None if module.bias is None else module.bias.double()
            truth = F.linear(x(dtype=dtype).double(), module.quantized.dequantized(torch.float64), shift)
            assert (found - truth).abs().max() <= 2 * (wanted - truth).abs().max()
        else:
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        torch.testing.assert_close(module(x(dtype=dtype).transpose(0, 1)), found.transpose(0, 1))
        with dequantizing(module):
            assert module.exact and not ThreadPoolExecutor(1).submit(getattr, module, "exact").result()
            torch.testing.assert_close(module(x(dtype=dtype)), wanted, rtol=0, atol=0)
    assert not module.exact


def test_gradients_flow_to_input_and_bias():
    module, plain = linear(), nn.Linear(INPUTS, OUTPUTS)
    plain.weight.data, plain.bias.data = module.weight.clone(), module.bias.data.clone()
    found = []
    for one in (module, plain):
        with torch.enable_grad():
            given = x().requires_grad_()
            one(given).square().sum().backward()
        found.append((given.grad, one.bias.grad))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert [name for name, _ in module.named_parameters()] == ["bias"]


def test_autocast_is_taken_as_torch_takes_it():
    module, plain = linear(), nn.Linear(INPUTS, OUTPUTS)
    plain.weight.data, plain.bias.data = module.weight.clone(), module.bias.data.clone()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = module(x()), plain(x())
    assert ours.dtype == theirs.dtype == torch.bfloat16 and torch.equal(ours, theirs)


@pytest.mark.parametrize("weights", ["int8", "int4-g32-asym", "fp8"])
@pytest.mark.parametrize("move", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double()])
def test_numbers_and_scales_are_never_cast(weights, move):
    module = linear(weights)
    before = [None if t is None else t.clone() for t in module.buffers()]
    dtype = move(module).bias.dtype
    for tensor, was in zip(module.buffers(), before, strict=True):
        assert tensor.dtype == was.dtype and torch.equal(tensor, was)
    assert module.weight.dtype == dtype
    with torch.no_grad():
        assert module(x(dtype=dtype)).dtype == dtype
    module.to("meta")
    assert all(tensor.is_meta for tensor in (*module.buffers(), *module.parameters()))


@pytest.mark.parametrize("weights", ["int8", "int4-g32-asym", "fp8"])
def test_state_dicts_copies_and_files(weights):
    module, other = linear(weights), linear(weights)
    names = {"data", "scales", "bias"} | ({"zeros"} if weights.endswith("asym") else set())
    assert set(module.state_dict()) == names
    for buffer in other.buffers():
        buffer.zero_()
    other.load_state_dict(module.state_dict())
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    with torch.no_grad():
        for copied in (other, copy.deepcopy(module), torch.load(file, weights_only=False)):
            assert torch.equal(copied(x()), module(x()))
            assert copied.data.data_ptr() != module.data.data_ptr()


def test_a_fingerprint_sees_its_weight_replaced():
    module = linear()
    seen = Fingerprint(module)
    assert seen.holds() and seen.reachable()
    module.data = module.data.clone()
    assert not seen.holds()
    seen = Fingerprint(module)
    module.scheme = Scheme.parse("int8")
    assert not seen.holds()


WRITES = {
    "add": lambda m: m.weight.add_(1),
    "data-add": lambda m: m.weight.data.add_(1),
    "data-iadd": lambda m: exec("m.weight.data += 1", {"m": m}),
    "data-set": lambda m: setattr(m.weight, "data", torch.zeros(OUTPUTS, INPUTS)),
    "item": lambda m: m.weight.__setitem__(0, 1.0),
    "copy": lambda m: m.weight.copy_(torch.zeros(OUTPUTS, INPUTS)),
    "init": lambda m: nn.init.normal_(m.weight),
    "reset": lambda m: m.reset_parameters(),
    "parameter": lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(OUTPUTS, INPUTS))),
    "tensor": lambda m: setattr(m, "weight", torch.zeros(OUTPUTS, INPUTS)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_its_weight_cannot_be_written_to(write):
    module = linear()
    before = torch.Tensor(module.weight)
    with torch.no_grad(), pytest.raises((RuntimeError, KeyError, AttributeError)):
        write(module)
    assert torch.equal(module.weight, before)


def test_its_weight_can_be_read_as_any_other():
    weight = linear(dtype=torch.bfloat16).weight
    assert weight.is_floating_point() and weight.device.type == "cpu" and not weight.requires_grad
    for got in (weight.float(), weight + 1, weight.t() @ weight, weight[2:4], weight.data.float().abs()):
        assert type(got) is torch.Tensor
    assert torch.equal(torch.zeros(OUTPUTS, INPUTS, dtype=torch.bfloat16).add_(weight), weight.clone())
    assert torch.equal(copy.deepcopy(weight), weight)
    assert weight.to("meta").is_meta and weight.numel() == OUTPUTS * INPUTS


def test_it_says_what_it_is():
    assert "in_features=128, out_features=24, bias=True, int4 by 32 columns, asymmetric" in repr(linear())


def test_columns_are_looked_up_again_wherever_they_come_from():
    """Loaded over others, moved, copied, pickled: the mask that the kernel reads is that of the buffer."""
    torch.manual_seed(0)
    plain, scheme = nn.Linear(INPUTS, OUTPUTS), Scheme("int8", activations="int8-outliers-static")
    weight = round_to_nearest(plain.weight, scheme)
    module = QuantizedLinear(weight, plain.bias, torch.float32, scheme, input_columns=torch.tensor([3, 90]))
    other = QuantizedLinear(weight, plain.bias, torch.float32, scheme, input_columns=torch.tensor([7, 8]))
    module.load_state_dict(other.state_dict())
    twins = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), copy.deepcopy(module).to(torch.bfloat16)]
    for one in (module, *twins):
        mask, columns, count = one.fixed
        assert columns.tolist() == one.input_columns.tolist() == [7, 8] and count.tolist() == [2]
        assert mask.dtype == torch.int8 and mask.nonzero().flatten().tolist() == [7, 8] and mask.max() == 1
    assert module.to("meta").fixed.mask.is_meta
