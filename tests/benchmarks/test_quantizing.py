"""benchmarks/calibrating.py and crossover.py: at toy size, and what they make of what was measured."""

import json

import pytest


def test_calibration_is_timed_by_layer_and_what_fails_is_told(script, tmp_path):
    calibrating = script("calibrating")
    sizes = ["--model", "tiny", "--layers", "1", "--windows", "2", "--tokens", "16"]
    ways = ["--ways", "int4:rtn", "int8:gptq", "int8"]  # 32 inputs are no multiple of 128
    result = calibrating.main(calibrating.arguments([str(tmp_path / "out.json"), *sizes, *ways]))
    assert json.loads((tmp_path / "out.json").read_text()) == result
    assert [row["way"] for row in result["failed"]] == ["int4:rtn"] and "multiple of 128" in result["failed"][0][
        "reason"
    ]
    assert [row["method"] for row in result["rows"]] == ["gptq", "rtn"]
    for row in result["rows"]:  # of two layers one was measured
        assert row["layers"] == len(row["layer_s"]) == 1 and row["whole_s"] >= row["took_s"] - 0.1


def test_from_a_folder_all_of_it_is_quantized_saved_and_loaded(script, tmp_path):
    calibrating = script("calibrating")
    sizes = ["--model", "tiny", "--windows", "2", "--tokens", "16", "--folder", str(tmp_path / "models")]
    ways = ["--ways", "int8:rtn", "int8:gptq"]
    result = calibrating.main(calibrating.arguments([str(tmp_path / "out.json"), *sizes, *ways]))
    assert result["failed"] == [] and [row["method"] for row in result["rows"]] == ["rtn", "gptq"]
    stock = sum(path.stat().st_size for path in (tmp_path / "models" / "stock").glob("*.safetensors")) / 2**20
    for row in result["rows"]:
        assert row["layers"] > 1 and row["quantize_s"] >= row["layers_s"] > 0 and row["load_s"] > 0
        assert 0 < row["final_mb"] < 0.85 * stock  # with words in float32; of the model as it was it would be all
        assert row["final_mb"] < row["final_and_two_layers_mb"]
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["stock"]  # what came of it is gone again


def test_no_time_left_is_told(script, tmp_path):
    calibrating = script("calibrating")
    given = [str(tmp_path / "out.json"), "--model", "tiny", "--ways", "int8", "--seconds", "-1"]
    result = calibrating.main(calibrating.arguments(given))
    assert result["rows"] == [] and "seconds were over" in result["failed"][0]["reason"]


@pytest.mark.parametrize(
    ("rounded", "least"), [((9, 9, 9), None), ((9, 4, 4), 16), ((1, 9, 4), 32), ((1, 1, 1), 8), ((1, 1, 5), None)]
)
def test_rounding_pays_from_where_it_is_faster_all_the_way(rounded, least, script):
    pytest.importorskip("triton")
    us = {str(rows): {"kept": 5, "rounded": time} for rows, time in zip((8, 16, 32), rounded, strict=True)}
    assert script("crossover").least(us) == least
