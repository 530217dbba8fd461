"""The study of quality, at toy size; a way that fails costs no other."""

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.quality import measure, text, ways
from support.everything import EVERYTHING

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "models" / "tiny-lm"


@pytest.fixture
def toy(tmp_path):
    """A folder with a random Llama of two layers, on tiny-lm's tokens."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "toy")
    tokenizer.save_pretrained(tmp_path / "toy")
    return tmp_path / "toy"


@pytest.mark.skipif(not EVERYTHING, reason="ours alone to run; ACCEL_TEST_EVERYTHING=1 runs it")
def test_a_toy_is_measured(toy, tmp_path):
    out = tmp_path / "toy.json"
    wrong = '[{"weights": "int8", "method": "gptq"}]'
    result = measure.main(toy, out, windows_of=1, texts=2, only="int8", options=wrong)
    assert [row["reason"].partition(":")[0] for row in result["failed"]] == ["TypeError"]
    assert json.loads(out.read_text())["case"] == "quality-toy"
    ways = [row["way"] for row in result["rows"] if row["model"] == "as trained"]
    assert {"int8, rtn", "kv int8", "int8, smoothquant, inputs int8"} <= set(ways) and "fp8, rtn" not in ways
    assert all(math.isfinite(row["perplexity"]) for row in result["rows"] + result["as_run"])
    row = next(row for row in result["rows"] if row["way"] == "int8, rtn")
    assert len(row["linears_db"]) == 14 and min(row["linears_db"].values()) > 35 and len(row["layers_db"]) == 2


@pytest.mark.turns(2)
def test_interrupted_runs_leave_what_they_have(toy, monkeypatch, tmp_path):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "as_run", stop)
    with pytest.raises(KeyboardInterrupt):
        measure.main(toy, tmp_path / "toy.json", windows_of=1, texts=1, only="kv,int8")
    left = json.loads((tmp_path / "toy.json").read_text())
    assert "kv int8" in [row["way"] for row in left["rows"]] and left["as_run"] == [] and left["took_s"] > 0


@pytest.mark.turns(2)
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
