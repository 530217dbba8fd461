"""`python -m benchmarks peers` at toy size: packages that are missing, and variants that cannot be made."""

import json
import time

import pytest

from accel.bench.timing import within
from benchmarks.models import peers
from support.everything import EVERYTHING

SIZES = {"model": "tiny", "new_tokens": 2, "prefill": 512, "seconds": 30.0}


@pytest.mark.skipif(not EVERYTHING, reason="ours alone to run; ACCEL_TEST_EVERYTHING=1 runs it")
def test_what_is_missing_and_what_fails_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "version", lambda package: None)
    monkeypatch.setattr(peers, "PROMPT", 16)
    names = ["stock", "accel int8", "accel int4", "torchao int8", "bitsandbytes nf4"]
    result = peers.main(tmp_path / "out.json", peers=",".join(names), batches="1,2", **SIZES)
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

    monkeypatch.setattr(peers, "interleaved", stop)
    with pytest.raises(KeyboardInterrupt):
        peers.main(tmp_path / "out.json", peers="stock", batches="1", **SIZES)
    left = json.loads((tmp_path / "out.json").read_text())
    assert list(left["variants"]) == ["stock"] and left["decode"] == [] and left["took_s"] > 0


def test_a_limit_of_time_is_kept():
    with pytest.raises(TimeoutError, match=r"0\.05 s"), within(0.05):
        time.sleep(60)  # which nothing but the limit ends with this error
    with within(0.05):
        pass
    time.sleep(0.1)  # nothing is left to go off
