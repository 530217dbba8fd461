"""Weights divided into files: how much is in memory, what the manifest says, what is refused and not begun."""

import json
import re

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from torch import nn

import accel
from accel.llm.shards.divide import divide
from accel.llm.shards.manifest import MANIFEST, checksum, read_manifest
from accel.parallel.division import Division, spans_of, taken
from support.llm import families
from support.llm.live_bytes import LiveBytes

DEEP = {"num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 256}


@pytest.fixture
def saved(tmp_path):
    """A folder with a model, quantized where a scheme is given."""

    def save(name: str, scheme: str | None = None, **changes):
        model = families.make(name, **{"vocab_size": families.EVEN_VOCAB} | changes)
        if scheme is None:
            model.save_pretrained(tmp_path / "whole")
        else:
            accel.quantize(model, scheme, out=tmp_path / "whole")
        return tmp_path / "whole"

    return save


def whole_tensors(folder) -> dict[str, torch.Tensor]:
    return {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}


@pytest.mark.parametrize("scheme", [None, "int4-g32"])
def test_two_layers_are_in_memory_at_most(scheme, saved, tmp_path):
    whole = saved("llama", scheme, **DEEP)
    size = sum(file.stat().st_size for file in whole.glob("*.safetensors"))
    with LiveBytes(nn.Module()) as live:
        divide(whole, tmp_path / "parts", 2)
    assert 0 < live.peak < 2 * size / DEEP["num_hidden_layers"]


def test_files_hold_what_the_manifest_says(saved, tmp_path):
    whole, out = saved("mixtral"), tmp_path / "parts"
    (whole / "tokenizer.json").write_text("{}")
    done = []
    manifest = divide(whole, out, 4, lambda *at: done.append(at))
    assert read_manifest(out) == manifest and json.loads((out / MANIFEST).read_text())["version"] == 1
    assert done[-1][0] == done[-1][1] == len(done) == sum(map(len, manifest.files))
    assert manifest.plan["model.layers.*.self_attn.o_proj"] == "rowwise"
    tensors = whole_tensors(whole)
    assert manifest.tensors.keys() == tensors.keys()
    for rank, files in enumerate(manifest.files):
        held = {name: one for file in files for name, one in load_file(out / file.name).items()}
        assert held.keys() == tensors.keys()
        checksums = {name: value for file in files for name, value in file.checksums.items()}
        for name, part in held.items():
            described, division = manifest.tensors[name]
            assert described == (tuple(tensors[name].shape), tensors[name].dtype)
            assert torch.equal(part, taken(tensors[name], division, rank)) and checksum(part) == checksums[name]
        assert sum(file.bytes for file in files) == sum((out / file.name).stat().st_size for file in files)
    others = {file.name for file in out.iterdir()} - {file.name for files in manifest.files for file in files}
    assert others == {MANIFEST, "config.json", "generation_config.json", "tokenizer.json"}
    sizes = {manifest.tensors[name][1] for name in tensors if name.endswith("w2.weight")}
    assert sizes == {Division(1, (((0, 24),), ((24, 48),), ((48, 72),), ((72, 96),)))}


def test_words_that_ranks_do_not_divide_evenly(saved, tmp_path):
    """As DTensor divides them: the last has fewer. Before 5.18 transformers refuses them."""
    folder = saved("llama", vocab_size=99)
    if Version(transformers.__version__) < Version("5.18"):
        with pytest.raises(ValueError, match="must be divisible"):
            divide(folder, tmp_path / "parts", 2)
        return
    manifest = divide(folder, tmp_path / "parts", 2)
    assert manifest.tensors["model.embed_tokens.weight"][1] == Division(0, (((0, 50),), ((50, 99),)))


def test_parts_of_several_spans():
    rows = torch.arange(24).view(8, 3)
    packed = Division(0, (((0, 2), (4, 6)), ((2, 4), (6, 8))))
    assert torch.equal(taken(rows, packed, 1), rows[[2, 3, 6, 7]])
    assert taken(rows, Division(1, ((), ((0, 3),))), 0).shape == (8, 0)
    assert spans_of((slice(1, 3),), (4, 5)) == ((1, 3), (0, 5)) and spans_of(..., (4,)) == ((0, 4),)
    with pytest.raises(ValueError, match="every 2th"):
        spans_of((slice(0, 4, 2),), (4,))


@pytest.mark.parametrize(
    ("name", "scheme", "changes", "told"),
    [
        # 96 columns in groups of 32 are three groups, of which two ranks would have one and a half.
        ("llama", "int4-g32", {}, r"mlp\.down_proj: 2 ranks would cut a group of 32 inputs: of 96 .* 0 to 47"),
        ("llama", "int8", {"intermediate_size": 104}, r"of 104 inputs rank 0 is to have 0 to 51, not a multiple of 8"),
        ("gpt2", None, {}, "no plan to divide a GPT2LMHeadModel"),
    ],
)
def test_what_does_not_divide_is_refused(name, scheme, changes, told, saved, tmp_path):
    with pytest.raises(ValueError, match=told):
        divide(saved(name, scheme, **changes), tmp_path / "parts", 2)
    assert not (tmp_path / "parts").exists()


def test_other_folders_are_refused(saved, tmp_path):
    whole, out = saved("llama"), tmp_path / "parts"
    divide(whole, out, 2)
    for folder, target, ranks, told in (
        (whole, out, 2, "not an empty folder"),
        (whole, tmp_path / "more", 1, "2 ranks or more, not 1"),
        (out, tmp_path / "more", 2, "divided already"),
        (tmp_path, tmp_path / "more", 2, "no config.json"),
    ):
        with pytest.raises(ValueError, match=told):
            divide(folder, target, ranks)
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    with pytest.raises(ValueError, match="quantized by gptq"):
        divide(whole, tmp_path / "more", 2)
    (whole / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with pytest.raises(ValueError, match=re.escape("down_proj.weight is (64, 48) in the files and (64, 64)")):
        divide(whole, tmp_path / "more", 2)
    assert not (tmp_path / "more").exists()
