"""The study of products, at toy size."""

import json

import pytest
from accel_kernels import fused_linear


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
