"""`python -m benchmarks sensitive-layers`: kinds told apart, quantized one at a time and put back."""

import copy
import json
from pathlib import Path

import pytest
import torch
import typer

from accel.quantization.module import QuantizedLinear
from benchmarks.models.tiny_denoisers import given, transformer
from benchmarks.quality import sensitive

ROOT = Path(__file__).parents[2]
FLUX = {
    "attention in": ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"),
    "attention out": ("attn.to_out.0", "attn.to_add_out"),
    "feed-forward in": ("ff.net.0.proj", "ff_context.net.0.proj", "proj_mlp"),
    "feed-forward out": ("ff.net.2", "ff_context.net.2", "0.proj_out"),
    "modulation": ("norm1.linear", "norm1_context.linear", "norm.linear"),
    "outside": ("x_embedder", "context_embedder", "linear_1", "linear_2", "norm_out.linear", "proj_out"),
}


def test_kinds_of_linears():
    model = transformer("flux")
    kinds = sensitive.kinds_of(model, ((), given("flux")))
    assert {kind: len(members) for kind, members in kinds.items()} == dict(zip(FLUX, (9, 2, 3, 3, 3, 8), strict=True))
    assert all(path.endswith(FLUX[kind]) for kind, members in kinds.items() for path in members)
    pixart = sensitive.kinds_of(transformer("pixart"), ((), given("pixart")))
    assert set(pixart) == set(FLUX) - {"modulation"} and all(".attn" in path for path in pixart["attention out"])


def test_one_kind_at_a_time(monkeypatch):
    model, calls = transformer("flux"), [((), given("flux", times=6))]
    stock, kinds = copy.deepcopy(model), sensitive.kinds_of(model, calls[0])
    run, seen, kept = sensitive.run, [], []

    def watched(*call):
        seen.append({path for path, module in model.named_modules() if type(module) is QuantizedLinear})
        return run(*call)

    def keep(result):
        kept.append(json.dumps(result))

    monkeypatch.setattr(sensitive, "run", watched)
    rows = sensitive.measure(model, calls, ["int8"], True, keep)["int8"]
    *before, default, every = seen
    assert before == [set(), set(), set(), *map(set, kinds.values())]  # stock, kinds told, nothing in 8 bits
    assert every == set.union(*map(set, kinds.values())) and default < every
    assert default == {path for kind, members in kinds.items() if kind[0] in "af" for path in members}
    assert list(rows) == ["nothing", *kinds, "default", "all"] and json.loads(kept[-1]) == {"int8": rows}
    assert rows["nothing"]["relative_rms"] == 0 and all(rows[name]["relative_rms"] > 1e-4 for name in kinds)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), stock.parameters(), strict=True))
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_saved_pipeline(tmp_path, capsys):
    folder, out = ROOT / "examples" / "models" / "tiny-dit-digits", tmp_path / "out.json"
    sensitive.main(str(folder), out, "int8", weights_only=True, prompts="two", steps=3, calls=2)
    result = json.loads(out.read_text())
    assert result["model"] == "SD3Transformer2DModel" and not result["rows_rounded"] and "2 calls" in result["about"]
    assert result["schemes"]["int8"]["modulation"]["linears"] == 10 and "feed-forward out" in capsys.readouterr().out
    with pytest.raises(typer.BadParameter, match="neither a folder nor one of"):
        sensitive.main("nothing-here", out)
