"""`accel coverage`: classes of different kinds, those that fail in each way, and names that there are not."""

import json
import multiprocessing
import os
import time

import pytest
import torch

import accel
from accel.bench import encoder_coverage
from accel.bench.llm import coverage, tiny
from support.command_line import run_command

PART = "minimax_m3_vl_text"


@pytest.mark.turns(4)
def test_three_kinds_of_layers(tmp_path):
    """Attention alone, a kind that is not known between others, and no cache."""
    page = tmp_path / "page.md"
    result = run_command("coverage", "qwen3", PART, "rwkv", "--out", tmp_path, "--page", page, "--jobs", "2")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "coverage.json").read_text())
    rows = {row["types"][0]: row for row in found["rows"]}
    assert {name: row["outcome"] for name, row in rows.items()} == {"qwen3": "whole", PART: "part", "rwkv": "stock"}
    assert {*rows[PART]["layers"]} == {"full_attention", "minimax_m3_sparse"}
    assert not rows["qwen3"]["reasons"] and rows[PART]["reasons"] and rows["rwkv"]["reasons"]
    assert not any(row["fallbacks"] or "not compared" in row for row in rows.values())
    assert found["counts"] | {"whole": 1, "part": 1, "stock": 1} == found["counts"]
    assert sum(found["counts"].values()) == found["classes"] == 3
    assert found["machine"]["transformers"] in page.read_text() and "rwkv" in result.output
    assert "| qwen3 | whole |  |" in page.read_text()


def test_unknown_names_are_refused():
    result = run_command("coverage", "qwen3", "abacus")
    assert result.exit_code == 2
    assert "'abacus'" in result.output and "qwen3_moe" in result.output


def test_a_name_is_a_type_or_the_beginning_of_some():
    assert coverage.find_classes(["qwen3"]) == {"Qwen3ForCausalLM": ["qwen3"]}
    begin = coverage.find_classes(["granitem"])
    assert begin.keys() > {"GraniteMoeForCausalLM"} and "GraniteForCausalLM" not in begin
    assert "llama" in coverage.find_classes(["llama"])["LlamaForCausalLM"]  # with all other types of that class


@pytest.mark.turns(2)
def test_encoders_are_of_several_kinds():
    names = {"BertModel": "whole", "FNetModel": "stock", "LEDForConditionalGeneration": "part", "ViTModel": "whole"}
    rows = []
    for name, outcome in names.items():
        row = {"class": name}
        for found in encoder_coverage.examine_encoder(name):
            row |= found
        rows.append(row)
        assert row["outcome"] == outcome and not row["fallbacks"] and bool(row["reasons"]) == (outcome != "whole")
    share = "2 of 3 encoders that attend (67%) are fused by layers: 1 of 1 text, 0 of 1 encoder-decoder, 1 of 1 image"
    assert encoder_coverage.share_of(rows) == share


def test_what_cannot_be_built_is_a_row(monkeypatch):
    def refuse(kind, config):
        raise ValueError(f"no {kind.__name__}")

    monkeypatch.setattr(tiny, "run_tiny", refuse)
    *_, row = coverage.examine(["llama"])
    assert row == {"outcome": "not built", "reasons": ["ValueError: no LlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("patch", "told"),
    [
        (lambda model: model.get_output_embeddings().weight.data.neg_(), "tokens: "),
        (lambda model: setattr(model, "generate", None), "tokens: TypeError"),
        (lambda model: setattr(model, "forward", lambda *args, **kwargs: 1 / 0), "tokens: ZeroDivisionError"),
    ],
    ids=["tokens", "generate", "forward"],
)
def test_what_differs_from_stock_is_wrong(monkeypatch, patch, told):
    monkeypatch.setattr(accel, "optimize", lambda model, **options: patch(model))
    *_, row = coverage.examine(["llama"])
    assert row["outcome"] == "wrong" and row["reasons"][0].startswith(told)


def test_logits_may_differ_by_rounding_alone():
    stock = {"logits": torch.tensor([1.0, 100.0])}
    assert coverage.wrong_answer(stock, {"logits": torch.tensor([1.01, 100.0])}) is None
    assert coverage.wrong_answer(stock, {"logits": torch.tensor([2.0, 100.0])})
    assert coverage.wrong_answer(stock, {"logits": torch.tensor([1.0, torch.nan])})
    assert coverage.wrong_answer({"logits": "it raised"}, {"logits": "it raised otherwise"}) is None


@pytest.mark.parametrize(
    ("end", "told"),
    [(lambda *args: os._exit(7), "exit code 7 while starting"), (lambda *args: time.sleep(60), "took more than 0.2 s")],
    ids=["dies", "hangs"],
)
def test_a_process_that_ends_early_is_a_row(monkeypatch, end, told):
    monkeypatch.setattr(coverage, "tell", end)
    row = coverage.one_row(multiprocessing.get_context("fork"), "Some", ["some"], 0.2)
    assert row["outcome"] == "ended" and row["reasons"][0].startswith(told)
    assert coverage.summarized([row])["counts"]["ended"] == 1
