"""Experts that came in MXFP4 and were written out: packed again, exactly, and written out by `restore`."""

import copy
from weakref import ref

import pytest
import torch

import accel
from accel.bench.llm.models import beside
from accel.llm.moe.experts import ExpertsForward
from accel.llm.ptq.mxfp4 import packed_exactly
from accel.quantization.experts import QuantizedExperts
from support.llm.families import padded, prompt
from support.llm.outputs import generate, ran_fast, same
from support.llm.quantized import STACKS, mixture, of_experts, sites

mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")


def arrived(dtype=torch.float32, seed=0):
    """gpt-oss as transformers makes it of a file in MXFP4 where it has no kernels."""
    model = mixture("gpt-oss", dtype)
    generator = torch.Generator().manual_seed(seed)
    for module in of_experts(model).values():
        for name in STACKS:
            stack = getattr(module, name)
            count, inputs, outputs = stack.shape
            blocks = torch.randint(256, (count, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(118, 124, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
            stack.data = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    return model


def bits(tensor):
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.turns(2)
def test_packed_and_given_back_bit_for_bit(dtype, tmp_path):
    model = arrived(dtype)
    stock, own = copy.deepcopy(model), {name: ref(one) for name, one in model.named_parameters()}
    accel.optimize(model)
    assert accel.verify(model).passed  # which restores it meanwhile
    for path, module in of_experts(model).items():
        assert type(module) is QuantizedExperts and type(vars(module)["forward"]) is ExpertsForward
        assert sites(model)[path][0] == "patched" and "bit for bit" in sites(model)[path][1]
        for name in STACKS:
            original = stock.get_submodule(path).get_parameter(name)
            assert torch.equal(bits(module.written(name, module.stack(name), dtype)), bits(original))
            assert own[f"{path}.{name}"]() is None
            assert module.stack(name).nbytes == original.numel() * 17 // 32
    if dtype == torch.float32:
        torch.testing.assert_close(model(prompt(1, 40)).logits, stock(prompt(1, 40)).logits, rtol=1e-4, atol=1e-4)
        same(generate(model, *padded()), generate(stock, *padded()))
        ran_fast(model)
    model.save_pretrained(tmp_path)
    loaded = accel.load(tmp_path, dtype=dtype)
    accel.restore(model)
    assert [*own] == [name for name, _ in model.named_parameters()]
    for name, one in model.named_parameters():
        assert one.is_contiguous() and one.requires_grad == stock.get_parameter(name).requires_grad
        assert torch.equal(bits(one), bits(stock.get_parameter(name)))
        assert torch.equal(bits(one), bits(loaded.get_parameter(name)))


@pytest.mark.turns(2)
def test_what_is_not_exact_stays_plain():
    model = arrived(torch.bfloat16)
    first, second = of_experts(model).items()
    second[1].down_proj.data[3, 40, 2] += 2**-7
    stock = copy.deepcopy(model)
    accel.optimize(model)
    assert type(model.get_submodule(first[0])) is QuantizedExperts
    assert model.get_submodule(second[0]) is second[1] and "down_proj: some of its" in sites(model)[second[0]][1]
    assert torch.equal(second[1].down_proj, stock.get_submodule(second[0]).down_proj)
    random = accel.optimize(mixture("gpt-oss"))
    assert not sites(random) and not {type(one) for one in of_experts(random).values()} & {QuantizedExperts}


def test_another_model_over_the_same_weights_keeps_them():
    model = arrived()
    other = beside(model)
    wanted = other(prompt()).logits
    accel.optimize(model)
    assert torch.equal(other(prompt()).logits, wanted)
    accel.restore(model)
    assert all(one is two for one, two in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.turns(2)
def test_changes_of_the_model_meanwhile_are_kept():
    model = arrived()
    stock = copy.deepcopy(model).to(torch.bfloat16)
    accel.optimize(accel.optimize(model))
    model.to(torch.bfloat16)
    with pytest.warns(UserWarning, match="not trained"):
        model.train()
    accel.restore(model.eval())
    for name, one in model.named_parameters():
        assert torch.equal(bits(one), bits(stock.get_parameter(name)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_two_numbers_with_every_scale_are_exact(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 256, 1).expand(1, 240, 256, 16)
    scales = torch.arange(1, 241, dtype=torch.uint8).view(1, 240, 1).expand(1, 240, 256)
    plain = mxfp4.convert_moe_packed_tensors(codes, scales, dtype=dtype).transpose(1, 2)
    packed = packed_exactly(plain)
    assert packed is not None and torch.equal(bits(packed.dequantized(dtype)), bits(plain[0]))
