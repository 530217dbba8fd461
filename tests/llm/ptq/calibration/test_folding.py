"""Batches of calibration, and scales folded into the layer before."""

import copy

import pytest
import torch

import accel
from accel.comparison import relative_rms
from accel.llm.ptq.calibration.batches import batches, windows
from accel.llm.ptq.calibration.folding import BeforeNorm, BeforeRows, layer_groups
from support.llm.calls import tokenizer
from support.llm.families import FAMILIES, every, make, padded

TEXTS = ["abcdef", "hello there", "once more"]


def test_every_kind_of_data_is_the_same_batches(method_with_data):
    from torch.utils.data import DataLoader

    model, words = make("llama"), tokenizer()
    texts = [{"input_ids": words(text)["input_ids"]} for text in TEXTS]
    kinds = [TEXTS, iter(TEXTS), tuple(TEXTS), [{"text": text, "label": 0} for text in TEXTS], texts]
    kinds += [[words(text, return_tensors="pt") for text in TEXTS], [row["input_ids"] for row in texts]]
    kinds += [DataLoader([{"input_ids": torch.tensor(row["input_ids"])} for row in texts])]
    found = [batches(model, kind, words) for kind in kinds]
    for batch in zip(*found, strict=True):
        assert all(torch.equal(one["input_ids"], batch[0]["input_ids"]) for one in batch)
        assert all(one["input_ids"].dtype == torch.int64 and one["input_ids"].dim() == 2 for one in batch)
    accel.quantize(model, "int8", TEXTS, tokenizer=words)
    method, given, known = method_with_data[0]
    assert method == "gptq" and len(given) == 3 and known == {}


def test_rows_as_long_come_together_padded_ones_alone(monkeypatch):
    monkeypatch.setattr("accel.llm.ptq.calibration.batches.TOGETHER", 20)
    model = make("llama")
    rows = [torch.full((1, length), number) for number, length in enumerate((5, 5, 5, 5, 5, 7, 5, 5))]
    padded = {"input_ids": rows[6], "attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}
    whole = {"input_ids": rows[7], "attention_mask": torch.ones(1, 5, dtype=torch.long)}
    found = batches(model, [*rows[:6], padded, whole, rows[7]], None)
    assert [batch["input_ids"][:, 0].tolist() for batch in found] == [[0, 1, 2, 3], [4], [5], [6], [7, 7]]
    assert ["attention_mask" in batch for batch in found] == [False, False, False, True, False]


def test_rows_and_tokens_are_bounded():
    model, words = make("llama"), tokenizer()

    def endless():
        while True:
            yield {"input_ids": torch.ones(50, 4, dtype=torch.long), "labels": None}

    assert [batch["input_ids"].shape for batch in batches(model, endless(), None)] == [(128, 4)]
    (long,) = batches(model, ["abc " * 500], words)
    assert long["input_ids"].shape == (1, 128)  # as many positions as the model has
    rows = windows("abc " * 100, words, 32)
    assert {row.shape for row in rows} == {(1, 32)} and len(rows) > 1
    assert [row.shape[1] < 32 for row in windows("abc", words, 32)] == [True]


FAST = [family.name for family in FAMILIES if family.expected == "fast"]
IN, OUT, UP, DOWN, ALL = "attention", "attention's output", "MLP", "MLP's output", "attention and MLP"
# What takes a scale in every layer; of the others the reason says why not.
FOLDS = {
    "llama": {IN, OUT, UP, DOWN},
    "llama-mqa": {IN, OUT, UP, DOWN},
    "phi3": {IN, OUT, UP, DOWN},  # one matrix for queries, keys and values, one for gate and up
    "gemma": {IN, OUT, UP, DOWN},  # 1 + w
    "gemma2": {IN, OUT, UP, DOWN},
    "olmo": {OUT, DOWN},  # norms without weights
    "olmo2": {OUT, DOWN},  # norms only behind
    "starcoder2": {IN, OUT, UP},  # GELU of a multiple
    "gpt2": {IN, OUT, UP},
    "gpt-neox": {IN, OUT, UP},
    "bloom": {IN, OUT, UP},
    "opt": {IN, OUT, UP, DOWN},  # ReLU
    "phi": {ALL, OUT},
    "cohere": {ALL, OUT, DOWN},
    "falcon-one-key": {ALL, OUT},
    "falcon-grouped": {IN, OUT, UP},
    "bitnet": {IN, OUT, UP, DOWN},  # norms before the last projections
    "mixtral": {IN, OUT},
    "gpt-oss": {IN, OUT},
}


def fold_all(model, groups) -> set[str]:
    """Random scales in all that can take one; the paths of what changed."""
    generator, changed = torch.Generator().manual_seed(3), set()
    for group in (group for layer in groups.values() for group in layer if group.before is not None):
        inputs = model.get_submodule(group.paths[0])
        count = inputs.weight.shape[0] if type(inputs).__name__ == "Conv1D" else inputs.weight.shape[1]
        scales = group.before.tied(torch.rand(count, generator=generator) * 3.75 + 0.25)
        changed |= group.fold(model, scales).keys()
    return changed


def logits(model) -> torch.Tensor:
    ids, mask = padded()
    torch.manual_seed(1)
    return model(input_ids=ids, attention_mask=mask).logits[mask.bool()]


@pytest.mark.parametrize(("name",), every(2, FAST))
@pytest.mark.share(6)
def test_the_folded_model_computes_the_same(name):
    stock = make(name)
    model = copy.deepcopy(stock)
    groups = layer_groups(model)
    changed = fold_all(model, groups)
    differ = {path for path, p in model.named_parameters() if not torch.equal(p, stock.get_parameter(path))}
    assert differ == changed
    for layer in groups.values():
        if name in FOLDS:
            assert {group.label for group in layer if group.before is not None} == FOLDS[name]
        assert all(group.reason for group in layer if group.before is None)
    assert differ and relative_rms(logits(model), logits(stock)) < 1e-5


def test_heads_of_queries_that_share_values_share_their_scales():
    model = make("llama")  # four on two
    group = next(group for group in layer_groups(model)["model.layers.0"] if group.label == OUT)
    assert isinstance(group.before, BeforeRows)
    sizes = torch.arange(64.0)
    tied = group.before.tied(sizes).unflatten(0, (2, 2, 16))
    assert torch.equal(tied[:, 0], tied[:, 1])
    assert torch.equal(tied[:, 0], sizes.unflatten(0, (2, 2, 16)).mean(1))


def reason(model, label: str) -> str:
    return next(group.reason for group in layer_groups(model)["model.layers.0"] if group.label == label)


def test_reasons():
    model, twice = make("llama"), make("llama")
    layers, layer = model.model.layers, twice.model.layers[0]
    layers[0].input_layernorm.weight = layers[1].input_layernorm.weight
    layers[0].mlp.up_proj.weight = layers[1].mlp.up_proj.weight
    assert all("another module" in reason(model, label) for label in (IN, UP, DOWN)) and reason(model, OUT) == ""
    layer.post_attention_layernorm = layer.input_layernorm
    assert "another place" in reason(twice, IN) and "another place" in reason(twice, UP)
    assert "no norm stands before" in reason(make("olmo2"), IN)
    assert "no norm with a weight" in reason(make("olmo"), IN)
    assert "gelu" in reason(make("starcoder2"), DOWN)


def test_an_offset_of_the_norm_is_kept():
    model = make("gemma")
    group = layer_groups(model)["model.layers.0"][0]
    assert isinstance(group.before, BeforeNorm) and group.before.kind.offset == 1
    before = group.before.module.weight.clone()
    group.fold(model, torch.full((64,), 4.0))
    torch.testing.assert_close(group.before.module.weight, (1 + before) / 4 - 1)
