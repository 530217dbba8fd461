"""`python -m benchmarks text` at toy size: packages that are missing, and settings that cannot be made."""

import json
import time

import pytest

from accel.bench.timing import within
from benchmarks.models import text
from support.everything import EVERYTHING

SIZES = {"model": "tiny", "new_tokens": 2, "prefill": 512, "seconds": 30.0}


@pytest.mark.skipif(not EVERYTHING, reason="ours alone to run; ACCEL_TEST_EVERYTHING=1 runs it")
def test_what_is_missing_and_what_fails_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(text, "version", lambda package: None)
    monkeypatch.setattr(text, "PROMPT", 16)
    names = ["stock", "accel int8", "accel int4", "torchao int8", "bitsandbytes nf4"]
    result = text.main(tmp_path / "out.json", settings=";".join(names), batches="1,2", **SIZES)
    assert json.loads((tmp_path / "out.json").read_text())["variants"] == result["variants"]
    assert result["missing"] == ["bitsandbytes", "torchao"]
    (failed,) = result["failed"]  # 32 inputs are no multiple of 128
    assert (failed["variant"], failed["reason"]) == ("accel int4", "ValueError: no linear layer was quantized")
    assert list(result["variants"]) == ["stock", "accel int8"]
    assert 0 == result["variants"]["stock"]["kl"] < result["variants"]["accel int8"]["kl"] < 0.01
    assert [row["batch"] for row in result["decode"]] == [1, 2] and [row["tokens"] for row in result["prefill"]] == [
        512
    ]
    assert all(set(row) >= {"stock", "accel int8"} for row in result["decode"] + result["prefill"])


def test_an_interrupted_run_leaves_what_it_has(monkeypatch, tmp_path):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(text.cases, "interleaved", stop)
    with pytest.raises(KeyboardInterrupt):
        text.main(tmp_path / "out.json", settings="stock", batches="1", **SIZES)
    left = json.loads((tmp_path / "out.json").read_text())
    assert list(left["variants"]) == ["stock"] and left["decode"] == [] and left["took_s"] > 0


def test_a_limit_of_time_is_kept():
    with pytest.raises(TimeoutError, match=r"0\.05 s"), within(0.05):
        time.sleep(60)  # which nothing but the limit ends with this error
    with within(0.05):
        pass
    time.sleep(0.1)  # nothing is left to go off


def test_batches_are_timed_where_their_tokens_are_right(tmp_path, monkeypatch):
    monkeypatch.setattr("gc.collect", lambda *_: 0)  # stock's manager looks through all objects of the tests
    monkeypatch.setattr(text.batch, "CHECKED", (2, 4))
    monkeypatch.setattr(text, "PROMPT", 16)
    found = text.batches(tmp_path / "out.json", "tiny", "accel", requests="1,2", tokens=8, new=3)
    assert found["failed"] == [] and [row["requests"] for row in found["rows"]] == [1, 2]
    assert all(row["accel"]["tok_s"] > 0 for row in found["rows"])
    assert found["variants"]["accel"]["worst_margin"] <= found["variants"]["accel"]["margin_allowed"]
