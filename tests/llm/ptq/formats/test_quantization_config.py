"""Folders whose files say one thing and hold another: accel.load names both in a ValueError, or loads them right.

The layouts of compressed-tensors: of what they say, every field is changed; GPTQ and AWQ: by their configurations.
"""

import copy
import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import accel
from accel import saved
from support.llm.families import make, prompt
from support.llm.quantized import held_by, logits

UP = "model.layers.1.mlp.up_proj"
SCHEMES = {"int4-g32": None, "int8-asym": None, "int8": "int8", "fp8": None}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By scheme: a folder of a quantized model; "stock": of one that is not."""
    root = tmp_path_factory.mktemp("folders")
    for scheme, activations in SCHEMES.items():
        accel.quantize(make("llama-biases"), scheme, activations=activations).save_pretrained(root / scheme)
    make("llama-biases").save_pretrained(root / "stock")
    return root


@pytest.fixture
def folder(folders, tmp_path):
    """folder(scheme): a copy to be changed."""
    return lambda scheme: shutil.copytree(folders / scheme, tmp_path / scheme)


def tensors(folder, change):
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})


def said(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def weights_said(config):
    return config["quantization_config"]["config_groups"]["group_0"]["weights"]


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_without_its_configuration_a_quantized_folder_is_no_model(scheme, folder):
    place = folder(scheme)
    said(place, lambda config: config.pop("quantization_config"))
    with pytest.raises(ValueError, match=r"(lacks|holds) model\.layers\.0\.mlp\.down_proj\.weight"):
        accel.load(place)


KEYS = {
    rf"lacks {UP}.weight, which": lambda t: t.pop(f"{UP}.weight"),
    r"lacks model\.layers\.\S+, \S+, \S+ and \d+ more, which": lambda t: [t.pop(n) for n in list(t) if "bias" in n],
    r"holds model.extra.weight, for": lambda t: t.update({"model.extra.weight": torch.zeros(3)}),
    rf"{UP}.weight is \(96, 60\) in the file and \(96, 64\) in the model": lambda t: t.update(
        {f"{UP}.weight": torch.zeros(96, 60)}
    ),
    r"model.norm.weight is \(7,\) in the file": lambda t: t.update({"model.norm.weight": torch.ones(7)}),
}


@pytest.mark.parametrize("message", KEYS)
@pytest.mark.parametrize("load", [accel.load, lambda f: saved.load_saved(f, torch.float32, torch.device("cpu"))])
def test_weights_that_are_not_the_models_are_named(message, load, folder):
    place = folder("stock")
    assert torch.equal(logits(load(place))["logits"], logits(make("llama-biases"))["logits"])
    tensors(place, KEYS[message])
    with pytest.raises(ValueError, match=message):
        load(place)


def test_in_shards_too(tmp_path):
    make("llama-biases").save_pretrained(tmp_path, max_shard_size="60KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    file = tmp_path / index["weight_map"].pop(f"{UP}.weight")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    held = load_file(file)
    del held[f"{UP}.weight"]
    save_file(held, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks {UP}.weight, which"):
        accel.load(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=f"{file.name} is missing"):
        accel.load(tmp_path)


def test_tied_weights_own_buffers_and_what_a_class_lets_be_missing_are_no_error(tmp_path, monkeypatch):
    stock = make("llama-tied")
    stock.model.norm.weight.data.fill_(1)
    stock.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    tensors(tmp_path, lambda t: t.update({"model.rotary_emb.inv_freq": torch.ones(8), "old.bias": torch.ones(2)}))
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"old\.bias"])
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_missing", [r"model\.norm\.weight"])
    tensors(tmp_path, lambda t: t.pop("model.norm.weight"))
    assert torch.equal(logits(accel.load(tmp_path))["logits"], logits(stock)["logits"])


# -- what the configuration says ---------------------------------------------------------------------------------------

CONTRADICTIONS = {
    "num_bits": ("int4-g32", 8, "num_bits is 8 in quantization_config and 4 in the tensors"),
    "group_size": ("int4-g32", 64, "group_size is 64 in quantization_config and 32 in the tensors"),
    "symmetric": ("int4-g32", False, "symmetric is False in quantization_config and True in the tensors"),
    "symmetric, with zero points": ("int8-asym", True, "symmetric is True in quantization_config and False"),
    "strategy": ("int4-g32", "channel", r"group_size is \d+ in quantization_config and 32 in the tensors"),
    "strategy, by row": ("int8", "tensor", "strategy is 'tensor' in quantization_config and '64 scales' in the"),
    "type": ("int8", "float", "type is 'float' in quantization_config and 'int' in the tensors"),
    "type, of float8": ("fp8", "int", "type is 'int' in quantization_config and 'float' in the tensors"),
    "actorder": ("int4-g32", "group", "actorder is 'group' in quantization_config and None in the tensors"),
}


@pytest.mark.parametrize("field", CONTRADICTIONS)
def test_what_contradicts_the_tensors_is_named_with_them(field, folder):
    scheme, value, message = CONTRADICTIONS[field]
    place = folder(scheme)
    said(place, lambda config: weights_said(config).update({field.partition(",")[0]: value}))
    with pytest.raises(ValueError, match=rf"{scheme}: model\.layers\.0\.\S+: {message}"):
        accel.load(place)


def test_numbers_that_take_more_bits_than_they_have_are_left_to_their_package(folder):
    place, wanted = folder("int8"), logits(make("llama-biases"))["logits"]
    said(place, lambda config: weights_said(config).update(num_bits=4))  # as others write 4 bits with inputs in 8
    loaded = accel.load(place)
    assert not held_by(loaded) and (logits(loaded)["logits"] - wanted).norm() < 0.1 * wanted.norm()


def test_linears_that_it_leaves_out_are_named(folder):
    place = folder("int8")
    said(place, lambda config: config["quantization_config"]["ignore"].append(UP))
    with pytest.raises(ValueError, match=f"{UP}: quantization_config.ignore names it"):
        accel.load(place)
    group = {"targets": [r"re:.*layers\.0\."]}
    said(place, lambda config: config["quantization_config"]["ignore"].pop())
    said(place, lambda config: config["quantization_config"]["config_groups"]["group_0"].update(group))
    with pytest.raises(ValueError, match="layers.1.*no group of quantization_config.config_groups names it"):
        accel.load(place)


VALUES = (None, 0, -3, 2.5, "four", "", [], ["x"], [3], {}, {"x": 1}, True, "re:(")


def places_in(value, path=()):
    """Paths of everything inside a configuration."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*path, key)
            yield from places_in(inner, (*path, key))


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["int4-g32", "int8"])
def test_a_configuration_changed_anywhere_gives_the_model_or_a_value_error(scheme, folder):
    """Each value in turn is left out, or another by chance: never another error, never other logits in silence."""
    place, chance = folder(scheme), random.Random(0)
    file = place / "config.json"
    config, ids = json.loads(file.read_text()), prompt(1, 5)
    wanted, refused = accel.load(place)(ids).logits, 0
    for path in places_in(config["quantization_config"]):
        changed = copy.deepcopy(config)
        inside = changed["quantization_config"]
        for key in path[:-1]:
            inside = inside[key]
        if chance.random() < 0.3:
            del inside[path[-1]]
        else:
            inside[path[-1]] = chance.choice(VALUES)
        file.write_text(json.dumps(changed))
        try:
            found = accel.load(place)(ids).logits
        except ValueError as error:
            refused += str(place) in str(error)
            assert str(place) in str(error), (path, error)
        else:
            assert torch.equal(found, wanted), path
    assert refused > 5


# -- columns in an order of their own ----------------------------------------------------------------------------------


def ordered(place, rows=None):
    """Gives each linear of the folder an order of columns; returns the weights by path, as the format defines them."""
    exact, generator = {}, torch.Generator().manual_seed(0)

    def change(held):
        for name in [name for name in held if name.endswith("weight_packed")]:
            path, words = name.removesuffix(".weight_packed"), held[name]
            places = torch.arange(0, 32, 4)
            numbers = ((words[..., None] >> places) & 15).flatten(1).double() - 8
            scales = held[f"{path}.weight_scale"].double()
            order = torch.arange(numbers.shape[1]) // (numbers.shape[1] // scales.shape[1])
            order = order[torch.randperm(len(order), generator=generator)]
            held[f"{path}.weight_g_idx"] = order.int()
            exact[path] = numbers * scales[:, order]

    tensors(place, change)
    said(place, lambda config: weights_said(config).update(actorder="group"))
    return exact


@torch.no_grad()
def test_columns_in_an_order_of_their_own_are_of_the_groups_that_it_says(folder, tmp_path):
    place = folder("int4-g32")
    exact = ordered(place)
    loaded = accel.load(place)
    stock = make("llama-biases")
    for path, weight in exact.items():
        stock.get_submodule(path).weight.data = weight.float()
    assert len(exact) == len(held_by(loaded)) == 14 and all(module.scheme.ordered for module in held_by(loaded))
    torch.testing.assert_close(loaded(prompt(1, 9)).logits, stock(prompt(1, 9)).logits)
    accel.optimize(loaded)
    torch.testing.assert_close(loaded(prompt(1, 9)).logits, stock(prompt(1, 9)).logits)
    accel.restore(loaded)
    loaded.save_pretrained(tmp_path / "again")
    came, went = (load_file(one / "model.safetensors") for one in (place, tmp_path / "again"))
    assert came.keys() == went.keys() and all(torch.equal(came[name], went[name]) for name in came)
    torch.testing.assert_close(accel.load(tmp_path / "again")(prompt(1, 9)).logits, stock(prompt(1, 9)).logits)


ORDERS = {
    "an order of columns that does not give each of 2 groups 32 of them": lambda order: order.fill_(1),
    r"an order of columns \(64,\) of torch.float32 for 64 inputs": lambda order: order.float(),
    r"an order of columns \(60,\) of torch.int32 for 64 inputs": lambda order: order[:60].clone(),
}


@pytest.mark.parametrize("message", ORDERS)
def test_an_order_that_is_none_is_named(message, folder):
    place = folder("int4-g32")
    ordered(place)
    name = f"{UP}.weight_g_idx"
    tensors(place, lambda held: held.update({name: ORDERS[message](held[name])}))
    with pytest.raises(ValueError, match=f"{UP}: {message}"):
        accel.load(place)
    said(place, lambda config: weights_said(config).pop("actorder"))
    with pytest.raises(ValueError, match="actorder is None in quantization_config and 'group' in the tensors"):
        accel.load(place)


# -- other libraries' configurations -----------------------------------------------------------------------------------

OTHERS = {
    "bits is missing": ({"quant_method": "gptq", "group_size": 128}, "bits"),
    "bits is a text": ({"quant_method": "gptq", "bits": "four"}, "bits is 'four', not a whole number"),
    "bits is none": ({"quant_method": "gptq", "bits": 5}, "bits"),
    "group_size is a text": ({"quant_method": "gptq", "bits": 4, "group_size": "x"}, "group_size is 'x'"),
    "group_size is 0": ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size"),
    "desc_act is a text": ({"quant_method": "gptq", "bits": 4, "desc_act": "yes"}, "desc_act is 'yes', not true or"),
    "of AWQ, too": ({"quant_method": "awq", "bits": 4, "group_size": [1]}, r"group_size is \[1\]"),
    "zero_point": ({"quant_method": "awq", "bits": 4, "zero_point": 3}, "zero_point is 3, not true or false"),
    "no method": ({"bits": 4}, "quant_method"),
    "another method": ({"quant_method": "none such", "bits": 4}, "none such"),
    "no object": ([4], r"quantization_config is \[4\]"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_broken_configuration_of_another_library_is_named(case, folder):
    place, (config, message) = folder("stock"), OTHERS[case]
    said(place, lambda whole: whole.update(quantization_config=config))
    with pytest.raises(ValueError, match=f"(?s)stock/config.json.*{message}"):
        accel.load(place)


BROKEN = ("{", "[1]", '{"model_type": "none such"}', '{"model_type": "llama", "hidden_size": "x"}')


@pytest.mark.parametrize("content", BROKEN)
def test_a_configuration_that_cannot_be_read_is_named(content, folder):
    place = folder("stock")
    (place / "config.json").write_text(content)
    with pytest.raises(ValueError, match="stock/config.json"):
        accel.load(place)
