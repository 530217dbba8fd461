"""Studies of quality: a model is trained and measured, at toy size; a way that fails costs no other."""

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.quality import measure, text, training, ways
from support.everything import EVERYTHING

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "models" / "tiny-lm"


@pytest.mark.skipif(not EVERYTHING, reason="ours alone to run; ACCEL_TEST_EVERYTHING=1 runs it")
def test_a_toy_is_trained_and_measured(tmp_path):
    folder, out = tmp_path / "toy", tmp_path / "toy.json"
    plain = training.main(tmp_path / "plain", toy=True, batch=2, dropout=0.0)
    training.main(folder, toy=True, batch=2, dropout=0.3)
    told = json.loads((folder / "training.json").read_text())
    assert told["runs"][0]["dropout"] == 0.3
    (looked,), (other,) = (one["runs"][0]["course"] for one in (told, plain))
    assert looked["step"] == 4 and looked["perplexity"] != other["perplexity"]
    assert told["held_out"] < 2048, "worse than guessing"
    wrong = '[{"weights": "int8", "method": "gptq"}]'
    result = measure.main(folder, out, windows_of=1, texts=2, only="int8", options=wrong)
    assert [row["reason"].partition(":")[0] for row in result["failed"]] == ["TypeError"]
    assert json.loads(out.read_text())["case"] == "quality-toy"
    ways = [row["way"] for row in result["rows"] if row["model"] == "as trained"]
    assert {"int8, rtn", "kv int8", "int8, smoothquant, inputs int8"} <= set(ways) and "fp8, rtn" not in ways
    assert all(math.isfinite(row["perplexity"]) for row in result["rows"] + result["as_run"])
    row = next(row for row in result["rows"] if row["way"] == "int8, rtn")
    assert len(row["linears_db"]) == 14 and min(row["linears_db"].values()) > 35 and len(row["layers_db"]) == 2


def test_interrupted_runs_leave_what_they_have(monkeypatch, tmp_path):
    folder = tmp_path / "toy"
    training.main(folder, toy=True, batch=2)

    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "as_run", stop)
    with pytest.raises(KeyboardInterrupt):
        measure.main(folder, tmp_path / "toy.json", windows_of=1, texts=1, only="kv,int8")
    left = json.loads((tmp_path / "toy.json").read_text())
    assert "kv int8" in [row["way"] for row in left["rows"]] and left["as_run"] == [] and left["took_s"] > 0


def test_outliers_are_the_same_function_and_ruin_only_rounded_inputs():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stock, tokenizer = AutoModelForCausalLM.from_pretrained(TINY), AutoTokenizer.from_pretrained(TINY)
    rows, batches = text.windows(tokenizer, text.chapters(text.HELD_OUT))[:2], text.calibration(tokenizer, 1)
    own = text.perplexity(stock, rows)
    assert sum(len(b["input_ids"][0]) for b in batches) == text.WINDOW
    with torch.no_grad():
        measured = ways.Ways(ways.planted(stock), batches, rows)
        changes = [
            measured(way)["perplexity"] / own - 1
            for way in (ways.Way(), *(ways.Way("int8", inputs=kind) for kind in ("int8", "int8 but outliers")))
        ]
    assert abs(changes[0]) < 1e-5 and changes[1] > 0.03 and abs(changes[2]) < 0.015


def test_all_tokens_of_the_held_out_text_are_measured():
    """As tiny-lm's card says: 27,879 tokens."""
    from transformers import AutoTokenizer

    rows = text.windows(AutoTokenizer.from_pretrained(TINY), text.chapters(text.HELD_OUT))
    assert int((rows[:, 1:] != text.LEFT_OUT).sum()) == 27879 and rows.shape[1] == text.WINDOW + 1


def test_a_cache_is_rounded_inside_only():
    from transformers import DynamicCache

    keys, before = torch.randn(1, 2, 3, 16), DynamicCache.update
    with ways.rounding_cache("int8"):
        rounded, _ = DynamicCache().update(keys, keys, 0)
    assert 0 < float((rounded - keys).abs().max()) < 0.02
    assert DynamicCache.update is before and torch.equal(DynamicCache().update(keys, keys, 0)[0], keys)
