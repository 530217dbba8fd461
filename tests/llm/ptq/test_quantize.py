"""accel.quantize: what it leaves in place, and what it refuses before anything changes."""

import copy
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM

import accel
from accel.llm.ptq import run as running
from accel.llm.ptq.calibrate import LayerResult
from accel.quantization.module import QuantizedLinear
from support.llm.calls import tokenizer
from support.llm.families import layers, make, padded
from support.llm.outputs import generate, same
from support.llm.quantized import held_by, logits

IDS = [torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
TEXTS = ["abcdef", "hello there", "once more"]


def by_option(name: str, scheme: str):
    """What accel.optimize makes of it with this option, for good."""
    model = accel.optimize(make(name), weights=scheme, keep_original=False)
    with pytest.warns(UserWarning):
        return accel.restore(model)


@pytest.mark.parametrize("scheme", ["int8", "int4-g32-asym", "fp8"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-biases", "gpt2", "falcon-grouped", "mixtral", "mpt"])
@pytest.mark.share(6)
def test_it_is_what_the_option_makes_and_stays(name, scheme):
    model, wanted = make(name), by_option(name, scheme)
    assert accel.quantize(model, scheme) is model
    assert len(held_by(model)) == len(held_by(wanted)) > 0
    assert torch.equal(logits(model)["logits"], logits(wanted)["logits"])
    ids, mask = padded((9, 9))
    before = generate(model, ids, mask)
    accel.optimize(model)
    same(generate(model, ids, mask), before)
    accel.restore(model)
    assert held_by(model) and torch.equal(logits(model)["logits"], logits(wanted)["logits"])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_it_can_be_copied_and_each_copy_saved(copied, tmp_path):
    model = accel.quantize(make("llama"), "int8")
    other = copied(model)
    other.lm_head.weight.data.zero_()
    other.save_pretrained(tmp_path)
    assert not AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight.any()


def test_out_holds_the_model_and_its_tokenizer(tmp_path):
    model = accel.quantize(make("llama"), "int8", out=tmp_path / "out", tokenizer=tokenizer())
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja",
    }  # fmt: skip
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded)["logits"], logits(model)["logits"])


# -- what is refused ---------------------------------------------------------------------------------------------------


WRONG = {
    "scheme='int5' is not one of 'int8'": ("int5", None, None),
    "scheme=None is not one of": (None, None, None),
    "method='best' is not one of 'rtn', 'gptq', 'awq', 'smoothquant'": ("int8", IDS, "best"),
    "method='gptq' looks at calibration data": ("int8", None, "gptq"),
    "calibration holds texts: give their tokenizer": ("int8", TEXTS, None),
    "calibration holds no tokens": ("int8", [], None),
    "calibration is a str; give a list of texts": ("int8", "file.txt", None),
    "calibration is a int": ("int8", 7, None),
    "item 1 holds 'label', 'words'": ("int8", [IDS[0], {"label": 1, "words": "a"}], None),
    "input_ids of item 0 is no": ("int8", [torch.rand(2, 3)], None),
    "item 0 holds tokens outside the vocabulary of 99": ("int8", [torch.tensor([[1, 99]])], None),
    "input_ids of item 2 is no": ("int8", [IDS[0], IDS[1], ["a", "b"]], None),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_wrong_is_named_before_anything_changes(message, tiny, tmp_path):
    scheme, data, method = WRONG[message]
    model = make("llama")
    before = tiny.snapshot(model)
    with pytest.raises((ValueError, TypeError), match=message):
        accel.quantize(model, scheme, data, method=method, out=tmp_path / "out")
    tiny.assert_same_state(before, tiny.snapshot(model))
    assert not (tmp_path / "out").exists()


def test_groups_that_fit_nowhere_are_an_error_and_others_are_left_alone():
    model = make("llama")  # of 64 and 96 inputs
    with pytest.raises(ValueError, match=r"nothing to quantize as 'int4': model.layers.0.self_attn.q_proj: 64 inputs"):
        accel.quantize(model, "int4")
    assert not held_by(model)
    accel.quantize(model, "int4-g64")
    kinds = {type(layer.mlp.down_proj) for layer in layers(model).values()}
    assert kinds == {torch.nn.Linear} and len(held_by(model)) == 12
    with pytest.raises(ValueError, match=r"nothing to quantize as 'int8'"):
        accel.quantize(accel.quantize(make("llama"), "int8"), "int8")


def test_objects_that_are_no_language_models_and_optimized_ones(tiny):
    with pytest.raises(TypeError, match="causal language model of transformers, not a UNet2DConditionModel"):
        accel.quantize(tiny.unet(), "int8")
    model = accel.optimize(make("llama"))
    with pytest.raises(ValueError, match="call accel.restore"):
        accel.quantize(model, "int8")
    accel.quantize(accel.restore(model), "int8")
    with torch.device("meta"):
        empty = make("llama")
    with pytest.raises(ValueError, match="not loaded"):
        accel.quantize(empty, "int8")


def test_with_adapters_in_it_nothing_is_saved(tmp_path):
    peft = pytest.importorskip("peft")
    model = make("llama")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="a model with adapters in it cannot be saved"):
        accel.quantize(model, "int8", out=tmp_path / "out")
    assert not held_by(model) and not (tmp_path / "out").exists()
    assert len(held_by(accel.quantize(model, "int8"))) == 14


def test_results_that_are_not_of_the_model(monkeypatch):
    model = make("llama")
    real = running.quantize_layers

    def answered(change):
        monkeypatch.setattr(running, "quantize_layers", lambda *given: map(change, real(*given)))
        accel.quantize(model, "int8")

    with pytest.raises(ValueError, match="gave no weight for model.layers.0.mlp.down_proj"):
        answered(lambda result: result._replace(weights={}))
    with pytest.raises(ValueError, match=r"norm.weight of shape \(3,\) is no parameter"):
        answered(lambda result: result._replace(changed={"model.norm.weight": torch.ones(3)}))
    assert not held_by(model)


def test_changed_parameters_are_put_in_place_and_saved(monkeypatch, tmp_path):
    """As of a method that moves scales from a norm into the weights behind it."""
    model, real = make("llama"), running.quantize_layers

    def scaled(result: LayerResult) -> LayerResult:
        name = f"{result.path}.input_layernorm.weight"
        return result._replace(changed={name: torch.full((64,), 0.5)})

    monkeypatch.setattr(running, "quantize_layers", lambda *given: map(scaled, real(*given)))
    accel.quantize(model, "int8", out=tmp_path / "out")
    assert all((layer.input_layernorm.weight == 0.5).all() for layer in layers(model).values())
    assert type(model.model.layers[0].mlp.up_proj) is QuantizedLinear
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded)["logits"], logits(model)["logits"])
