"""benchmarks/plot.py: the images it draws of results."""

import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """Runs the script over the results in tmp_path, in this process, which has loaded most of what it imports."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    given = ["plot.py", "--results", str(tmp_path), "--out", str(tmp_path / "images" / "speed.png")]

    def drawn():
        monkeypatch.setattr(sys, "argv", given)
        runpy.run_path(str(ROOT / "benchmarks" / "plot.py"), run_name="__main__")
        pyplot.close("all")

    return drawn


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
    results = {
        "quantized-llama-8b": {"parts": {"decode": decode}},
        "quantized-chain": {"rows": []},
        "peers-llama-8b": {"decode": decode[:1], "compiled": {"stock": {"ms_step": 9.0}}},
        "quality-lm": {"rows": quality, "parameters": 98e6},
    }
    for case, result in results.items():
        (tmp_path / f"nvidia-h200-{case}.json").write_text(json.dumps({"case": case} | gpu | result))
    draw()
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["quantized.png"]
    assert (tmp_path / "images" / "quantized.png").stat().st_size > 20_000


def test_the_results_of_this_project_are_told_apart(draw):
    """Other scripts keep their files beside those of `accel bench`, and have what stock did in another form."""
    del draw  # has matplotlib, and the folder of scripts
    import plot

    found = plot.load(ROOT / "benchmarks" / "results")
    assert len(found) > 8 and {"sd15", "flux"} <= {one["case"] for one in found}
    assert all({"about", "dtype"} <= one.keys() for one in found)
