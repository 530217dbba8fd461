"""Weights whose columns lie in an order of their own: GPTQ's "act-order"."""

import pytest
import torch
from accel_kernels.gemm.quantized_weight import pack, quantize_weight, unpack

import accel
from accel.quantization.formats.repacked import column_order
from accel.quantization.product import Rows, product
from support.llm.outputs import same
from support.llm.prequantized.models import prequantized
from support.noted import OperationCount


@pytest.mark.parametrize("tokens", [1, 7])
def test_inputs_are_put_in_order_once_for_all_that_take_them(tokens):
    model, twin = prequantized("gptq-order", "llama")
    accel.optimize(model)
    ids = torch.arange(3, 3 + tokens)[None]
    with OperationCount(lambda one: one is torch.ops.aten.index_select.default) as gathers:
        found = model(ids)
    assert gathers.count == 2 * 4  # of attention, its output, gate and up, down
    same({"x": found.logits}, {"x": twin(ids).logits})
    alone, other = (model.model.layers[0].self_attn.get_submodule(name) for name in ("q_proj", "o_proj"))
    x = torch.randn(3, 64)
    rows = Rows(x)
    assert torch.equal(product(alone, rows), alone(x)) and torch.equal(product(other, rows), other(x))
    assert rows.ordered(alone, alone.quantized) is rows.ordered(other, other.quantized)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn])
def test_an_order_moves_numbers_and_no_value(dtype):
    group_of = (torch.arange(96) // 24)[torch.randperm(96, generator=torch.Generator().manual_seed(0))]
    order, repeats = column_order(group_of, 4)
    plain = quantize_weight(torch.randn(5, 96), dtype, 24)
    moved = plain.by_order(order)
    assert repeats.tolist() == [1] * 4 and torch.equal(moved.numbers().float(), plain.numbers().float())
    wanted = plain.numbers().float() * plain.scales[:, group_of]
    assert torch.equal(moved.dequantized(torch.float32), wanted)
    assert "order" in moved.reason() and moved.rows(1, 3).order is moved.order


@pytest.mark.parametrize("bits", range(2, 9))
def test_numbers_of_any_bits_are_one_stream(bits):
    numbers = torch.randint(-(1 << bits - 1), 1 << bits - 1, (3, 64)).to(torch.int8)
    words = pack(numbers, bits)
    assert words.shape == (3, 2 * bits) and torch.equal(unpack(words, bits), numbers)
    stored = sum(int(one) + (1 << bits - 1) << bits * place for place, one in enumerate(numbers[1]))
    assert int.from_bytes(words[1].numpy().tobytes(), "little") == stored
