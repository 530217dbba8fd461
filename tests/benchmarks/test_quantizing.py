"""Studies of calibration and of products, at toy size, and what they make of what was measured."""

import json

import pytest
from accel_kernels import fused_linear

from benchmarks.quality import calibrating


def test_all_of_it_is_quantized_saved_and_loaded_and_what_fails_is_told(tmp_path):
    sizes = {"model": "tiny", "windows": 2, "tokens": 16}
    ways = "int4:rtn,int8:rtn,int8:gptq"  # 32 inputs are no multiple of 128
    result = calibrating.main(tmp_path / "out.json", ways=ways, **sizes)
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == result["rows"]
    (failed,) = result["failed"]
    assert (failed["scheme"], failed["method"]) == ("int4", "rtn") and "multiple of 128" in failed["reason"]
    assert [row["method"] for row in result["rows"]] == ["rtn", "gptq"]
    for row in result["rows"]:
        assert row["layers"] > 1 and row["quantize_s"] >= row["layers_s"] > 0 and row["load_s"] > 0
        # With words in float32; of the model as it was it would be all.
        assert 0 < row["final_mb"] < 0.85 * 4 * 34976 / 2**20 and row["final_mb"] < row["final_and_two_layers_mb"]


def test_no_time_left_is_told(tmp_path):
    result = calibrating.main(tmp_path / "out.json", model="tiny", ways="int8", seconds=-1)
    assert result["rows"] == [] and "seconds were over" in result["skipped"][0]["reason"]


def test_products_are_timed_where_they_are_right(tmp_path, monkeypatch):
    """Toy sizes; that of two ways which is wrong has no time, and no sum."""
    pytest.importorskip("triton")
    from benchmarks.kernels import products, shapes

    monkeypatch.setitem(shapes.SHAPES, "narrow", shapes.Shape(1024, 1024, 1536, 8192, 2))
    monkeypatch.setattr(products, "full_in_passes", lambda *args, **more: fused_linear.reference(*args, **more))
    wrong = lambda *args, **more: 1.5 * fused_linear.reference(*args, **more)  # noqa: E731
    monkeypatch.setattr(type(fused_linear), "triton", property(lambda op: wrong))
    products.main(tmp_path / "out.json", "one-row", formats="bf16")
    found = json.loads((tmp_path / "out.json").read_text())
    rows = {(row["product"], row["way"]): row for row in found["rows"]}
    assert {way for _, way in rows} == {"torch", "chosen"} and {name for name, _ in rows} == {*PRODUCTS}
    assert all("us" in rows[name, "torch"] and "wrong by" in rows[name, "chosen"]["failed"] for name in PRODUCTS)
    times = [rows[name, "torch"]["us"] for name in PRODUCTS]
    assert found["sums"]["narrow, 1 rows, bf16, torch"] == pytest.approx(2 * sum(times) / 1e3, abs=1e-3)
    assert "narrow, 1 rows, bf16, chosen" not in found["sums"]


PRODUCTS = ("qkv", "out", "gate-up", "down")
