"""The output head in 8 bits too, where the name of the weights says so."""

import copy
import json
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM

import accel
from accel.quantization import activations as holding
from support.llm.edits.places import put
from support.llm.families import every, make, padded, prompt
from support.llm.outputs import generate, same
from support.llm.quantized import held_by, optimized, rounded, sites
from support.noted import noted


@torch.no_grad()
def test_a_step_multiplies_the_last_tokens_by_it_as_it_lies(monkeypatch):
    _, ours = optimized("llama", "int8-head")
    seen = noted(monkeypatch, holding, "quantized_linear", lambda x, weight, bias: (x.shape, weight))
    ours.generate(prompt(3, 40), max_new_tokens=4, do_sample=False)
    assert [shape for shape, _ in seen] == [(3, 1, 64)] * 4
    head = ours.get_output_embeddings()
    assert all(weight.data is head.data for _, weight in seen)


# -- undone, copied, adapted -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_tied_words_stay_as_they_are_and_are_tied_again(copied):
    model = make("llama-tied", torch.bfloat16)
    words = model.get_input_embeddings().weight
    values = words.detach().clone()
    accel.optimize(model, weights="int8-head")
    assert model.get_input_embeddings().weight is words and torch.equal(words, values)
    other = copied(model)
    for one in (model, other):
        head = one.get_output_embeddings()
        row = accel.report(one).weights[-1]
        assert head in held_by(one) and row["path"] == "lm_head"
        assert (row["bytes_before"], row["bytes_after"]) == (words.nbytes, words.nbytes + head.quantized.nbytes)
        assert sites(one)["lm_head"][1].endswith("MB more, since model.embed_tokens keeps the weight that it shares")
    with pytest.raises(RuntimeError, match="cannot be replaced by another, nor tied to it"):
        model.tie_weights()
    other.float()
    for one in (model, other):
        accel.restore(one)
        assert one.get_output_embeddings().weight is one.get_input_embeddings().weight
        assert torch.equal(one.get_output_embeddings().weight, values.to(one.dtype))
    assert model.get_output_embeddings().weight is words


@pytest.mark.parametrize(("name", "before"), every(2, ["llama", "llama-tied"], [True, False]))
def test_an_adapter_on_the_head(name, before):
    peft = pytest.importorskip("peft")

    def adapted(model):
        torch.manual_seed(3)
        put(model, peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False))
        return model

    stock, ours = make(name), make(name)
    if before:
        accel.optimize(adapted(ours), weights="int8-head")
    else:
        adapted(accel.optimize(ours, weights="int8-head"))
    assert ours.get_output_embeddings().base_layer in held_by(ours)
    theirs = accel.optimize(copy.deepcopy(stock), weights="int8-head")
    ids, mask = padded()
    same(generate(ours, ids, mask), generate(adapted(rounded(stock, theirs)), ids, mask))
    accel.restore(ours)
    same(generate(ours, ids, mask), generate(adapted(stock), ids, mask))


def test_writing_into_it_is_an_error():
    head = accel.optimize(make("llama-tied"), weights="int8-head").get_output_embeddings()
    with pytest.raises(RuntimeError, match="cannot be changed"):
        head.weight.mul_(2)


# -- what is said of it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma2"])
@pytest.mark.share(5)
def test_verify_tells_its_loss_and_fails_where_it_is_wrong(name, monkeypatch):
    _, ours = optimized(name, "int4-g32-head")
    quality = accel.verify(ours)
    assert quality.passed and quality.lossy == "weights='int4-g32-head'"
    operation = holding.quantized_linear
    monkeypatch.setattr(holding, "quantized_linear", lambda x, weight, bias: operation(x, weight, bias) * 1.001)
    assert not accel.verify(ours).passed


@torch.no_grad()
@pytest.mark.turns(2)
def test_its_rows_are_never_rounded(tmp_path):
    _, ours = optimized("llama-biases", "int8-head", activations="int8")
    rows = prompt(1, 80)
    ours(rows)
    assert ours.get_output_embeddings().activations is None
    assert {module.activations for module in held_by(ours)} == {"int8", None}
    assert accel.verify(ours, input_ids=rows).passed
    ours.save_pretrained(tmp_path)
    groups = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"].values()
    assert sorted((group["input_activations"] is None, "lm_head" in group["targets"]) for group in groups) == [
        (False, False), (True, True),
    ]  # fmt: skip
    for loaded in (accel.load(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        accel.optimize(loaded, activations="int8")
        assert loaded.get_output_embeddings().activations is None and len(held_by(loaded)) == 15
        assert sum(module.activations == "int8" for module in held_by(loaded)) == 14
        torch.testing.assert_close(loaded(rows).logits, ours(rows).logits, rtol=0, atol=0.2)
        accel.restore(loaded)
