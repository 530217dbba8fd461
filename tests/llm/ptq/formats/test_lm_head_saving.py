"""The output head in 8 bits: saved, loaded, arriving so, and beside layers that were calibrated."""

import copy
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import accel
from accel.quantization.module import dequantizing
from accel.quantization.rounding import round_to_nearest
from accel.quantization.scheme import Scheme
from support.llm.families import every, make, padded
from support.llm.outputs import generate, same
from support.llm.prequantized.linears import GptqLinear
from support.llm.quantized import HEADS, held_by, logits, optimized, rounded, sites

APART = Scheme("int8")


@pytest.mark.parametrize(
    ("name", "weights", "dtype"),
    every(4, ("llama", "llama-tied", "gemma2", "gpt2"), HEADS, (torch.float32, torch.bfloat16)),
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*linear layers, .* are saved in the model's dtype")
@pytest.mark.share(4)
def test_stock_transformers_and_load_compute_the_same(name, weights, dtype, tmp_path):
    pytest.importorskip("compressed_tensors")
    stock = make(name, dtype)
    stock.save_pretrained(tmp_path / "stock")  # what is not saved, as frequencies, is anew in full precision
    stock = type(stock).from_pretrained(tmp_path / "stock", dtype=dtype).eval()
    ours = accel.optimize(copy.deepcopy(stock), weights=weights)
    ours.save_pretrained(tmp_path / "ours")
    saved = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert saved["tie_word_embeddings"] is False and ours.config.tie_word_embeddings == stock.config.tie_word_embeddings
    wanted = logits(rounded(stock, ours))["logits"]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=dtype).eval()
    # The first call of what arrives quantized dequantizes it, so it is optimized before.
    prequantized = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=dtype).eval()
    loaded, whole = accel.load(tmp_path / "ours", dtype=dtype), weights == "int4-g32-asym-head" and name != "gpt2"
    with dequantizing(loaded):  # as transformers does it, where torch would multiply by the numbers
        assert torch.equal(logits(theirs)["logits"], wanted) and torch.equal(logits(loaded)["logits"], wanted)
    assert torch.equal(theirs.get_input_embeddings().weight, stock.get_input_embeddings().weight)
    assert (loaded.get_output_embeddings() in held_by(loaded)) is not whole
    ids, mask = padded((9, 9))
    # GPT-2's layers are saved whole, rounded to bf16, where the original multiplies by their numbers.
    wanted = generate(accel.optimize(theirs) if (name, dtype) == ("gpt2", torch.bfloat16) else ours, ids, mask)
    for one in (loaded, prequantized):
        accel.optimize(one)
        same(generate(one, ids, mask), wanted, 1e-5 if dtype == torch.float32 else 0.05)
    if "asym" not in weights:  # which transformers loads dequantized
        assert sites(prequantized)["lm_head"][1].startswith(f"{Scheme.of_head(weights)}, arrived as compressed-tensors")
    accel.restore(prequantized)
    same(logits(prequantized), logits(accel.restore(theirs)))


def test_a_head_that_is_saved_under_another_name(tmp_path):
    ours = accel.quantize(make("gpt-neox"), "int8-head", out=tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "embed_out.weight_scale" in file.keys()
    loaded = accel.load(tmp_path)
    assert loaded.get_output_embeddings() in held_by(loaded)
    assert torch.equal(logits(loaded)["logits"], logits(ours)["logits"])


def test_a_scheme_that_transformers_would_not_read_is_written_whole_and_it_says_so(tmp_path):
    _, ours = optimized("llama-tied", "int4-g32-asym-head")
    with pytest.warns(UserWarning, match="1 linear layers, lm_head the first, .* by the scheme of those"):
        ours.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved["lm_head.weight"], ours.get_output_embeddings().weight)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]


def test_a_folder_whose_configuration_ties_what_it_quantizes(tmp_path):
    stock, ours = optimized("llama-tied", "int8-head")
    ours.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    loaded = accel.load(tmp_path)
    assert loaded.get_output_embeddings() in held_by(loaded) and loaded.config.tie_word_embeddings is False
    same(logits(loaded), logits(rounded(stock, ours)), 0)


def test_a_head_of_another_library():
    stock = make("llama", vocab_size=104)  # zero points are packed by eight words
    model, values = copy.deepcopy(stock), copy.deepcopy(stock)
    rounded_head = round_to_nearest(stock.lm_head.weight, Scheme("int4", 32, False))
    rounded_head = rounded_head._replace(zeros=rounded_head.zeros.clamp_min(-7))
    numbers, zeros = rounded_head.numbers().int() + 8, rounded_head.zeros.int() + 8
    model.lm_head = GptqLinear(numbers, zeros, rounded_head.scales, None)
    values.lm_head.weight.data = rounded_head.dequantized(torch.float32)
    given = model.lm_head
    accel.optimize(model, weights="int8-head")
    assert sites(model)["lm_head"][0] == "patched" and model.lm_head.scheme == Scheme("int4", 32, False)
    ids, mask = padded()
    same(generate(model, ids, mask), generate(rounded(values, model), ids, mask))
    accel.restore(model)
    assert model.lm_head is given
    same(generate(model, ids, mask), generate(values, ids, mask))


IDS = [torch.randint(3, 99, (2, 24), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
@pytest.mark.parametrize(
    ("scheme", "method"), [("int4-g32-head", "gptq"), ("int4-g32-head", "awq"), ("int8-head", "smoothquant")]
)
@pytest.mark.share(4)
def test_methods_leave_it_to_rounding_to_nearest(name, scheme, method, tmp_path):
    stock, model = make(name), make(name)
    accel.quantize(model, scheme, [{"input_ids": ids} for ids in IDS], method=method, out=tmp_path / "out")
    head = model.get_output_embeddings()
    wanted = round_to_nearest(stock.get_output_embeddings().weight, APART)
    assert len(held_by(model)) == 15 and head.scheme == APART
    for one in (head, accel.load(tmp_path / "out").get_output_embeddings()):
        assert torch.equal(one.data, wanted.data) and torch.equal(one.scales, wanted.scales)
    assert torch.equal(model.get_input_embeddings().weight, stock.get_input_embeddings().weight)
    accel.optimize(model)
    assert accel.verify(model).passed
