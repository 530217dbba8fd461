"""Weights of bitsandbytes in 4 bits, read where they lie."""

import pytest
import torch
from torch import nn

import accel
from accel.diffusion.dit.block import BlockForward
from accel.quantization.formats.stored import StoredWeight
from accel.quantization.formats.stored_weight import read_stored, recognize, stored_weight
from accel.seq2seq.step_trial import Waits
from support.bits import as_elsewhere, four_bit, product_count
from support.compatibility.diffusers_calls import inputs
from support.compatibility.tiny_diffusers_models import build
from support.compatibility.transformer_pair import FLUX, SD3, WAN, TransformerPair, alike, first
from support.diffusion.outputs import close, run
from support.everything import EVERYTHING
from support.llm.families import layers, make, padded
from support.llm.outputs import generate, ran_fast, same
from support.state import assert_same_state, snapshot

bitsandbytes = pytest.importorskip("bitsandbytes")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = [(kind, nested) for kind in ("nf4", "fp4") for nested in (False, True)]


@pytest.fixture
def pair(request, monkeypatch):
    return TransformerPair(request.param, monkeypatch)


@pytest.fixture(autouse=True)
def any_cpu(monkeypatch):
    as_elsewhere(monkeypatch)


@pytest.mark.parametrize(("kind", "nested"), KINDS)
@pytest.mark.parametrize("block", [64, 256, 1024])
def test_its_values_are_the_librarys_to_the_bit(kind, nested, block):
    for dtype in DTYPES:
        columns = max(192, block) if block != 256 else 768
        linear = four_bit(nn.Linear(columns, 23, dtype=dtype), kind, nested, block=block)
        found = stored_weight(linear)
        assert found.weight.shape == (23, columns) and found.weight.format.name == kind and found.dtype == dtype
        assert found.weight.data.data_ptr() == linear.weight.data_ptr()
        for wanted in DTYPES:
            linear.quant_state.dtype = wanted
            theirs = bitsandbytes.functional.dequantize_4bit(linear.weight, linear.quant_state)
            assert torch.equal(found.weight.dequantized(wanted), theirs)


@pytest.mark.parametrize("what", ["columns", "block", "nested", "packed", "uncalled", "meta", "turned", "scales"])
def test_what_cannot_be_read_is_told(what):
    linear = four_bit(nn.Linear(96 if what == "columns" else 64, 64, bias=False), nested=True)
    state = linear.quant_state
    if what == "block":
        state.blocksize = 96
    elif what == "nested":
        state.state2.blocksize = 128
    elif what == "packed":
        linear.support_avx512bf16_for_cpu = True
    elif what == "uncalled":
        linear.compute_type_is_set = False
    elif what == "meta":
        linear.weight = bitsandbytes.nn.Params4bit(linear.weight.detach().to("meta"), quant_state=state)
    elif what == "turned":
        state.shape = torch.Size((32, 128))
    elif what == "scales":
        state.absmax = state.absmax.float()
    assert isinstance(read_stored(linear), str)
    assert stored_weight(linear) is None


def test_an_embedding_is_no_linear():
    table = bitsandbytes.nn.Embedding8bit(40, 64)
    table.weight = bitsandbytes.nn.Int8Params(torch.randn(40, 64), False, False).to("cpu")
    assert table.weight.dtype == torch.int8 and recognize(table, torch.float32) is None


def test_who_watches_the_first_call_sees_no_comparison():
    with Waits() as waits:
        assert stored_weight(four_bit(nn.Linear(64, 39))) is not None
    assert waits.found is None


def test_what_computes_something_else_is_called():
    class Doubled(bitsandbytes.nn.Linear4bit):
        def forward(self, x):
            return super().forward(x) * 2

    linear = four_bit(nn.Linear(64, 32))
    assert stored_weight(linear) is not None
    linear.__class__ = Doubled
    assert stored_weight(linear) is None and isinstance(read_stored(linear), StoredWeight)


def in_four_bits(name="llama-biases", to=torch.float32, seed=1, **options):
    model = make(name, to, seed=seed, intermediate_size=128)
    for layer in layers(model).values():
        for where, linear in list(layer.named_modules()):
            if type(linear) is nn.Linear:
                layer.set_submodule(where, four_bit(linear, **options))
    return model


LLAMAS = [
    ("llama-biases", torch.float32, {"nested": True}),
    ("llama", torch.bfloat16, {"kind": "fp4", "seed": 2}),  # others have near ties
    ("llama-biases", torch.bfloat16, {"dtype": torch.float32}),
    ("qwen2", torch.float32, {"kind": "fp4", "nested": True, "dtype": torch.bfloat16}),
    ("phi3", torch.float32, {"dtype": torch.float16}),  # rounds as its linears do
    ("gpt-neox", torch.float32, {"nested": True}),
]


@pytest.mark.parametrize(("name", "dtype", "options"), LLAMAS if EVERYTHING else LLAMAS[:3] + LLAMAS[4:5])
@pytest.mark.share(4)
@pytest.mark.turns(2)
def test_language_models(name, dtype, options):
    model, stock = in_four_bits(name, dtype, **options), in_four_bits(name, dtype, **options)
    ids, mask = padded()
    wanted = generate(stock, ids, mask)
    generate(model, ids, mask)  # casts biases, in stock
    before, saved = snapshot(model), {key: one.clone() for key, one in model.state_dict().items()}
    accel.optimize(model)
    with product_count() as calls:
        same(generate(model, ids, mask), wanted)
    assert calls.count == 0
    ran_fast(model)
    rows = [reason for _, rule, status, reason in accel.report(model).sites if rule == "weights"]
    assert rows and all("read as it came" in reason for reason in rows)
    assert all(torch.equal(one, saved[key]) for key, one in model.state_dict().items())
    accel.restore(model)
    assert_same_state(before, snapshot(model))
    same(generate(model, ids, mask), wanted)


def hooked(linear):
    linear.register_forward_hook(lambda module, args, output: output * 1.5)


def replaced(linear):
    linear.weight = four_bit(nn.Linear(linear.in_features, linear.out_features)).weight
    linear.quant_state = linear.weight.quant_state


def scaled(linear):
    state = linear.weight.quant_state
    state = state.state2 if state.nested else state
    state.absmax = state.absmax * 1.5


def written(linear):
    linear.weight.data.copy_(linear.weight.data.flip(0))


def another_compute(linear):
    linear.compute_dtype = torch.bfloat16


def another_bias(linear):
    linear.bias.data = linear.bias.data.half() * 2


@pytest.mark.parametrize("change", [hooked, replaced, scaled, written, another_compute, another_bias])
def test_a_change_is_noticed(change):
    model, stock = in_four_bits(), in_four_bits()
    ids, mask = padded()
    accel.optimize(model)
    before = generate(model, ids, mask, output_scores=True, return_dict_in_generate=True)
    for one in (model, stock):
        torch.manual_seed(3)
        change(one.model.layers[1].mlp.up_proj)
    wanted = generate(stock, ids, mask, output_scores=True, return_dict_in_generate=True)
    found = generate(model, ids, mask, output_scores=True, return_dict_in_generate=True)
    same(found, wanted)
    assert any(not torch.equal(one, before[key]) for key, one in wanted.items())


@pytest.mark.turns(2)
def test_a_checkpoint_in_four_bits(tmp_path):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    make("llama", intermediate_size=128).save_pretrained(tmp_path / "plain")
    asked = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    load = AutoModelForCausalLM.from_pretrained
    more = {"dtype": torch.float32, "device_map": "cpu"}
    model, stock = (load(tmp_path / "plain", quantization_config=asked, **more).eval() for _ in range(2))
    accel.optimize(model)
    wanted = generate(stock, *padded())
    with product_count() as calls:
        same(generate(model, *padded()), wanted)
    assert calls.count == 0
    ran_fast(model)
    model.save_pretrained(tmp_path / "ours")
    stock.save_pretrained(tmp_path / "stock")
    ours, theirs = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("ours", "stock"))
    assert ours == theirs
    same(generate(accel.optimize(accel.load(tmp_path / "ours", torch.float32, "cpu")), *padded()), wanted)


@pytest.mark.parametrize("options", [{"nested": True}, {"kind": "fp4", "dtype": torch.bfloat16}])
def test_a_unet(options, tiny):
    sizes = {"block_out_channels": (64, 64), "cross_attention_dim": 64, "norm_num_groups": 8}
    stock, ours = tiny.unet("sdxl", **sizes), tiny.unet("sdxl", **sizes)
    for unet in (stock, ours):
        for where, linear in list(unet.named_modules()):
            if type(linear) is nn.Linear and "transformer_blocks" in where:
                unet.set_submodule(where, four_bit(linear, **options))
    inputs = tiny.inputs(stock)
    wanted = run(stock, inputs)
    accel.optimize(ours)
    run(ours, inputs)  # the first layer of each kind is compared
    with product_count() as calls:
        close(run(ours, inputs), wanted)
    assert calls.count == 0
    assert not accel.report(ours).fallbacks
    accel.restore(ours)
    assert torch.equal(run(ours, inputs), wanted)


def put_in(model, **options):
    for where, linear in list(model.named_modules()):
        if type(linear) is nn.Linear and "blocks" in where and linear.in_features % 32 == 0:
            model.set_submodule(where, four_bit(linear, block=32, **options))


TRANSFORMERS = [(FLUX, {"nested": True}), (SD3, {"kind": "fp4", "dtype": torch.bfloat16}), (WAN, {})]


@torch.no_grad()
@pytest.mark.parametrize(("pair", "options"), TRANSFORMERS, indirect=["pair"])
def test_blocks_of_transformers_are_recorded_with_it(pair, options):
    plain = pair.agree()
    pair.change(lambda model: put_in(model, **options))
    pair.agree(fast=None)  # biases are cast at the first call
    pair.agree()  # the first layer of each kind is compared
    ran = pair.plans
    with product_count() as calls:
        found = first(pair.ours(**pair.inputs))
    assert calls.count == 0 and pair.plans - ran == pair.blocks
    assert not torch.equal(found, plain)
    pair.change(lambda model: scaled(next(m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit))))
    assert not torch.equal(pair.agree(), found)


@torch.no_grad()
def test_a_transformer_that_arrives_in_four_bits():
    ours, stock = build(FLUX), build(FLUX)
    put_in(ours, nested=True)
    put_in(stock, nested=True)
    given = inputs(ours)
    wanted = first(stock(**given))
    before = snapshot(ours)
    accel.optimize(ours)
    first(ours(**given))
    with product_count() as calls:
        alike(first(ours(**given)), wanted)
    assert calls.count == 0 and not accel.report(ours).fallbacks
    plans = next(f.plans for f in (vars(m).get("forward") for m in ours.modules()) if isinstance(f, BlockForward))
    assert len(plans.found) == 2  # one for each kind of block
    accel.restore(ours)
    assert_same_state(before, snapshot(ours))
    assert torch.equal(first(ours(**given)), wanted)
