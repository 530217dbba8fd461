"""Saving quantized models, with their head too."""

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
from support.llm.families import every, make, padded, prompt
from support.llm.outputs import generate, same
from support.llm.prequantized.models import GptqLinear, prequantized
from support.llm.quantized import HEADS, held_by, logits, optimized, rounded, sites

pytest.importorskip("compressed_tensors")
SCHEMES = ("int8", "int8-asym", "int4-g32", "int4-g32-asym", "fp8")
PACKED = {"weight_packed", "weight_scale", "weight_shape"}


def reloaded(stock, folder):
    """As transformers makes it of its own file: what is not saved, as frequencies, is anew in full precision."""
    stock.save_pretrained(folder)
    return type(stock).from_pretrained(folder, dtype=stock.dtype).eval()


def opened(folder, dtype):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@pytest.mark.parametrize("weights", SCHEMES)
def test_the_file_holds_the_numbers_and_the_configuration_names_what_it_leaves_alone(weights, tmp_path):
    model = make("llama-biases", torch.bfloat16)
    accel.optimize(model, weights=weights)
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors",
    ]  # fmt: skip
    saved = load_file(tmp_path / "model.safetensors")
    wanted = {"weight", "weight_scale"} if weights == "fp8" else PACKED
    wanted = wanted | ({"weight_zero_point"} if "asym" in weights else set())
    prefix = "model.layers.1.mlp.up_proj."
    found = {name.removeprefix(prefix): tensor for name, tensor in saved.items() if name.startswith(prefix)}
    assert found.keys() == wanted | {"bias"}
    dtypes = {"weight_packed": torch.int32, "weight_scale": torch.bfloat16, "weight_shape": torch.int64}
    assert {name: found[name].dtype for name in dtypes.keys() & found.keys()}.items() <= dtypes.items()
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    kind = "float-quantized" if weights == "fp8" else "pack-quantized"
    assert config["quant_method"] == "compressed-tensors" and config["ignore"] == ["lm_head"]
    assert config["format"] == group["format"] == kind and group["targets"] == ["Linear"]
    assert group["weights"]["symmetric"] == ("asym" not in weights)
    assert group["weights"]["num_bits"] == (4 if "int4" in weights else 8) and group["input_activations"] is None
    assert group["weights"]["group_size"] == (32 if "g32" in weights else None)


def test_transposed_weights_are_saved_whole_and_it_says_so(tmp_path):
    stock = reloaded(make("gpt2"), tmp_path / "stock")
    ours = accel.optimize(copy.deepcopy(stock), weights="int8")
    reference = rounded(stock, ours)
    with pytest.warns(UserWarning, match=r"8 linear layers, transformer.h.0.attn.c_attn the first, are saved in"):
        ours.save_pretrained(tmp_path / "ours")
    assert "quantization_config" not in json.loads((tmp_path / "ours" / "config.json").read_text())
    assert torch.equal(logits(opened(tmp_path / "ours", None))["logits"], logits(reference)["logits"])


def one_in_two_places(model):
    one, other = (layer.mlp for layer in model.model.layers)
    other.up_proj = one.up_proj


ODD = {
    "what does not fit": ({"intermediate_size": 100}, None, {}),
    "shards": ({}, None, {"max_shard_size": "40KB"}),
    "a linear in two places": ({}, one_in_two_places, {}),
}


@pytest.mark.parametrize("case", ODD)
@pytest.mark.share(1)
@pytest.mark.turns(2)
def test_odd_models_and_ways_of_saving(case, tmp_path):
    changes, edit, given = ODD[case]
    stock = reloaded(make("llama", **changes), tmp_path / "stock")
    ours = copy.deepcopy(stock)
    for model in (stock, ours) if edit else ():
        edit(model)
    accel.optimize(ours, weights="int8").save_pretrained(tmp_path / "ours", **given)
    found = logits(opened(tmp_path / "ours", None))["logits"]
    assert torch.equal(found, logits(rounded(stock, ours))["logits"])
    if case == "what does not fit":
        config = json.loads((tmp_path / "ours" / "config.json").read_text())["quantization_config"]
        assert config["ignore"] == ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "lm_head"]
    if case == "shards":
        index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 1
        for name, file in index["weight_map"].items():
            with safe_open(tmp_path / "ours" / file, framework="pt") as opened_file:
                assert name in opened_file.keys()


def test_given_weights_are_written_as_the_models_own_are(tmp_path):
    """A trainer gives model.state_dict(); a user may give the originals."""
    model, twin = make("llama"), make("llama")
    accel.optimize(model, weights="int4-g32")
    model.save_pretrained(tmp_path / "a")
    model.save_pretrained(tmp_path / "b", state_dict=model.state_dict())
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    model.save_pretrained(tmp_path / "c", state_dict=twin.state_dict())
    found = [type(twin).from_pretrained(tmp_path / "c")]
    accel.restore(model)
    model.save_pretrained(tmp_path / "d")
    found.append(type(twin).from_pretrained(tmp_path / "d"))
    for loaded in found:
        assert all(torch.equal(*pair) for pair in zip(loaded.parameters(), twin.parameters(), strict=True))


def test_inside_an_adapter_it_is_not_saved(tmp_path):
    peft = pytest.importorskip("peft")
    model = accel.optimize(make("llama"), weights="int8")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"q_proj.base_layer is inside an adapter"):
        model.save_pretrained(tmp_path)
    adapted.save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".json", ".md"}


@pytest.mark.parametrize("activations", ["int8", "int8-outliers", "fp8"])
@torch.no_grad()
@pytest.mark.turns(2)
def test_rounded_activations_are_said_and_taken_up_again(activations, tmp_path):
    weights = activations.partition("-")[0]
    model = accel.quantize(make("llama-biases"), weights, activations=activations)
    model.save_pretrained(tmp_path)
    (group,) = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"].values()
    loaded, ids = accel.load(tmp_path), prompt(1, 80)
    if activations == "int8-outliers":  # which the file cannot say
        assert group["input_activations"] is None and {m.activations for m in held_by(loaded)} == {None}
        accel.optimize(loaded, activations=activations)
    else:
        assert (group["input_activations"]["strategy"], group["input_activations"]["dynamic"]) == ("token", True)
        # The same numbers: what is left is the order of sums, which sends few of fp8's across a half.
        theirs = opened(tmp_path, torch.float32)(ids).logits
        apart = (theirs - loaded(ids).logits).norm() / theirs.norm()
        assert apart < (1e-6 if activations == "int8" else 1e-3)
        apart = (theirs - accel.optimize(loaded)(ids).logits).norm() / theirs.norm()
        assert apart < (1e-6 if activations == "int8" else 1e-3) and not accel.report(loaded).fallbacks
        assert (theirs - make("llama-biases")(ids).logits).norm() > 1e-2 * theirs.norm()  # which rounding explains
    assert {module.activations for module in held_by(loaded)} == {activations}
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=0.2)
    accel.optimize(loaded)
    assert accel.verify(loaded, input_ids=ids).lossy == (
        None if activations == "int8-outliers" else f"activations='{activations}'"
    )


@torch.no_grad()
@pytest.mark.turns(2)
def test_a_smoothed_model_runs_with_activations_in_8_bits(tmp_path):
    model = make("llama")
    data = [{"input_ids": prompt(2, 40, seed)} for seed in range(2)]
    accel.quantize(model, "int8", data, method="smoothquant", out=tmp_path / "out")
    for one in (model, accel.load(tmp_path / "out")):
        accel.optimize(one)
        assert {module.activations for module in held_by(one)} == {"int8"} and len(held_by(one)) == 14
        quality = accel.verify(one, input_ids=prompt(1, 80))
        assert quality.passed and quality.lossy == "activations='int8'" and "their products" in quality.parts


APART = Scheme("int8")
FAMILIES = ("llama", "llama-tied", "llama-biases", "gemma2", "gpt2", "qwen2", "gpt-neox", "mixtral")


@pytest.mark.parametrize(
    ("name", "weights", "dtype"),
    every(7, FAMILIES, (*SCHEMES, *HEADS), (torch.float32, torch.bfloat16)),
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.* are saved in the model's dtype")
@pytest.mark.share(12)
@pytest.mark.turns(2)
def test_stock_transformers_and_load_compute_the_same(name, weights, dtype, tmp_path):
    stock = reloaded(make(name, dtype), tmp_path / "stock")
    ours = accel.optimize(copy.deepcopy(stock), weights=weights)
    ours.save_pretrained(tmp_path / "ours")
    saved, head = json.loads((tmp_path / "ours" / "config.json").read_text()), weights in HEADS
    assert ours.config.tie_word_embeddings == stock.config.tie_word_embeddings
    assert saved["tie_word_embeddings"] is (False if head else stock.config.tie_word_embeddings)
    assert vars(ours.config).get("quantization_config") is None
    wanted = logits(rounded(stock, ours))["logits"]
    # The first call of what arrives quantized dequantizes it, so it is optimized before.
    theirs, prequantized = (opened(tmp_path / "ours", dtype) for _ in range(2))
    loaded, whole = accel.load(tmp_path / "ours", dtype=dtype), weights == "int4-g32-asym-head" and name != "gpt2"
    assert not held_by(theirs) and not torch.equal(wanted, logits(stock)["logits"])
    with dequantizing(loaded):  # as transformers does it, where torch would multiply by the numbers
        apart = max((logits(one)["logits"] - wanted).abs().max() for one in (theirs, loaded))
    assert apart == 0 or (name == "mixtral" and apart < 1e-5)  # whose sums go by where in memory experts lie
    assert torch.equal(theirs.get_input_embeddings().weight, stock.get_input_embeddings().weight)
    assert (loaded.get_output_embeddings() in held_by(loaded)) is (head and not whole)
    ids, mask = padded((9, 9))
    # GPT-2's layers are saved whole, rounded to bf16, where the original multiplies by their numbers.
    wanted = generate(accel.optimize(theirs) if (name, dtype) == ("gpt2", torch.bfloat16) else ours, ids, mask)
    for one in (loaded, prequantized):
        accel.optimize(one)
        same(generate(one, ids, mask), wanted, 1e-5 if dtype == torch.float32 else 0.05)
    if head and "asym" not in weights:  # which transformers loads dequantized
        assert sites(prequantized)["lm_head"][1].startswith(f"{Scheme.of_head(weights)}, arrived as compressed-tensors")
    accel.restore(prequantized)
    same(logits(prequantized), logits(accel.restore(theirs)))


@pytest.mark.parametrize("weights", ["int8-head", "int4-g32-head"])  # one group of linears, or two by name
def test_a_head_that_is_saved_under_another_name(weights, tmp_path):
    ours = accel.quantize(make("gpt-neox"), weights, out=tmp_path)
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


def test_no_folder_holds_two_formats(tmp_path):
    model, _ = prequantized("gptq")
    module = model.model.layers[1].mlp.up_proj
    module.g_idx = (torch.arange(64) < 20).int()
    before = model.model.layers[0].mlp.up_proj = torch.nn.Linear(64, 96)
    with pytest.raises(
        ValueError, match=r"out: .*q_proj\.qweight is in the format of another library, and .*layers\.0"
    ):
        accel.quantize(model, "int8", out=tmp_path / "out")
    assert model.model.layers[0].mlp.up_proj is before
    accel.optimize(model, weights="int8-head")
    with pytest.raises(
        ValueError, match=r"1\.mlp\.up_proj\.qweight is in the format of another library.*accel.restore"
    ):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


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
@pytest.mark.turns(2)
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
