"""`python -m benchmarks plots`: the images it draws of results."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def draw(tmp_path):
    """Draws from the results in tmp_path."""
    pytest.importorskip("matplotlib")
    from benchmarks.plots.draw import main

    return lambda: main(tmp_path, tmp_path / "images")


@pytest.mark.turns(2)
def test_the_plot(tmp_path, draw):

    def figures(ms, rows=1):
        return {"ms_step": ms, "tok_s": rows * 1e3 / ms, "share_of_bandwidth": 3.5 / ms}

    result = {
        "case": "llm-llama-8b", "machine": {"gpu": "NVIDIA H200"}, "dtype": "bfloat16", "sizes": {"parameters": 8e9},
        "parts": {
            "decode": [
                {"batch": 1, "context": 512, "stock": figures(20.0), "accel": figures(4.0), "compile": figures(7.0)},
                {"batch": 8, "context": 512, "stock": figures(21.0, 8), "accel": figures(4.5, 8)},
                {"batch": 1, "context": 8192, "stock": figures(22.0)},
            ],
            "long": [{"context": 32768, "stock": figures(27.0), "accel": figures(6.0)}],
        },
    }  # fmt: skip
    (tmp_path / "nvidia-h200-llm-llama-8b.json").write_text(json.dumps(result))
    draw()
    drawn = (tmp_path / "images" / "decode.png").read_bytes()
    assert len(drawn) > 10_000
    (tmp_path / "nvidia-h200-llm-llama-8b-2.json").write_text(json.dumps(result))  # the same on another host
    draw()
    assert (tmp_path / "images" / "decode.png").read_bytes() == drawn


def test_the_plot_of_quantized_models(tmp_path, draw):
    gpu = {"machine": {"gpu": "NVIDIA H200"}}
    decode = [
        {"batch": rows, "context": 512} | {name: {"ms_step": ms, "tok_s": rows * 1e3 / ms} for name, ms in times}
        for rows, times in (
            (1, (("stock", 20.0), ("accel int4", 2.0), ("accel int4, kv int8", 1.9))),
            (8, (("stock", 21.0),)),
        )
    ]
    ways = [("int8", "rtn", None, 0.5, 1e-4), ("int4", "gptq", None, 0.26, 6e-3), ("int8", "rtn", "int8", 0.5, 7e-2)]
    keys = ("weights", "method", "inputs", "bytes_of_16_bits", "change")
    quality = [{"model": "as trained", "kv_cache": None} | dict(zip(keys, way, strict=True)) for way in ways]
    quality.append(quality[0] | {"weights": None, "kv_cache": "fp8"})
    adapted = {"plain": {"median_ms": 20.0, "ratio": 1.0}, "1 x 16": {"median_ms": 21.0, "ratio": 1.05}}
    results = {
        "quantized-llama-8b": {"parts": {"decode": decode}},
        "quantized-chain": {"rows": []},
        "peers-llama-8b": {"decode": decode[:1], "compiled": {"stock": {"ms_step": 9.0}}},
        "quality-lm": {"rows": quality, "parameters": 98e6},
        "adapters": {
            "rows": [{"name": "sdxl", "variants": adapted}, {"name": "lost", "failed": ""}],
            "commit": "1234567",
        },
    }
    for case, result in results.items():
        (tmp_path / f"nvidia-h200-{case}.json").write_text(json.dumps({"case": case} | gpu | result))
    draw()
    assert {path.name for path in (tmp_path / "images").iterdir()} == {"quantized.png", "adapters.png"}
    assert (tmp_path / "images" / "quantized.png").stat().st_size > 20_000


def test_the_results_of_this_project_are_told_apart():
    """Other studies keep their files beside those of `accel bench`, and have what stock did in another form."""
    pytest.importorskip("matplotlib")
    from benchmarks.plots.images import passes

    found = passes(ROOT / "benchmarks" / "results")
    assert len(found) > 8 and {"sd15", "flux"} <= {one["case"] for one in found}
    assert all({"about", "dtype"} <= one.keys() for one in found)


def test_where_nothing_was_measured_it_is_told(draw):
    with pytest.raises(SystemExit, match="run `make bench`"):
        draw()
