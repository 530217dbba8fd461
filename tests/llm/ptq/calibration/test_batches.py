"""Calibration data in every form that users have it, as the batches that it becomes."""

import torch

import accel
from accel.llm.ptq.calibration.batches import batches, windows
from support.llm.calls import tokenizer
from support.llm.families import make

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
