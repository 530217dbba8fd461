"""Shards of a checkpoint: how it is divided, and what each rank loads."""

import json
import re
import shutil

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
from support import shards
from support.llm import families
from support.llm.held_out import LiveBytes
from support.llm.miniatures.family import EVEN_VOCAB
from support.llm.parallel.ranks import padded_call

STEPS = 6
TWO = ("llama-biases", "llama-tied", "qwen3", "gemma2", "gpt-neox", "mixtral", "qwen3-moe")
FOUR = ("llama-mha",)
# Groups of 32 columns fit into halves and quarters.
WIDE = {"hidden_size": 128, "intermediate_size": 256}
SCHEMES = (
    ("llama-biases", "int8", 2, {}), ("llama", "int4-g32-asym", 2, WIDE), ("qwen3", "fp8-head", 2, {}),
    ("llama-mha", "int4-g32", 4, WIDE),
)  # fmt: skip


CALL = padded_call("cpu", STEPS)


@pytest.fixture
def saved(tmp_path):
    """A folder with a model, quantized where a scheme is given."""

    def save(name: str, scheme: str | None = None, **changes):
        model, folder = families.make(name, **{"vocab_size": EVEN_VOCAB} | changes), tmp_path / "whole"
        if scheme is None:
            model.save_pretrained(folder)
        else:
            accel.quantize(model, scheme, out=folder)
        return folder

    return save


@pytest.fixture
def divided(saved, tmp_path):
    """The model of a family, loaded from a folder, and the folder with its parts."""

    def made(name: str, ranks: int, scheme: str | None = None, **changes):
        whole, parts = saved(name, scheme, **changes), tmp_path / "parts"
        divide(whole, parts, ranks)
        return accel.load(whole), whole, parts

    return made


def expect(found: list[dict], model) -> None:
    tokens = model.generate(**CALL).tolist()
    for one in found:
        assert one["optimized"] == one["stock"] == [tokens]
        assert one["fallbacks"] == [] and one["restored"] and one["with gradients"] < 1e-5
        rules = {(path, rule, status) for path, rule, status, _ in one["sites"]}
        for layer in families.layers(model):
            assert (layer, "decoder layer", "patched") in rules


@pytest.mark.parametrize(("name", "ranks"), [*((name, 2) for name in TWO), *((name, 4) for name in FOUR)])
@pytest.mark.turns(4)
def test_ranks_get_what_transformers_gives_them(name, ranks, rank_pool, divided):
    model, whole, parts = divided(name, ranks)
    assert rank_pool(ranks).run(shards.differing, str(whole), str(parts), ranks) == [[]] * ranks
    expect(rank_pool(ranks).run(shards.write, str(parts), [CALL]), model)


@pytest.mark.parametrize(("name", "scheme", "ranks", "changes"), SCHEMES)
@pytest.mark.turns(2)
def test_quantized_weights(name, scheme, ranks, changes, rank_pool, divided):
    model, _, parts = divided(name, ranks, scheme, **changes)
    found = rank_pool(ranks).run(shards.write, str(parts), [CALL])
    expect(found, model)
    assert found[0]["quantized"] == sum(type(one).__name__ == "QuantizedLinear" for one in model.modules()) > 0
    whole = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
    assert max(one["bytes"] for one in found) < whole / ranks * 1.25  # norms and biases of sums are whole on each
    told = rank_pool(ranks).run(shards.refused, str(parts), "save_pretrained")
    assert all("part of the quantized weights alone" in one for one in told)


def test_a_rank_needs_no_files_but_its_own(rank_pool, divided, tmp_path):
    _, whole, parts = divided("qwen3", 2)
    for rank, files in enumerate(read_manifest(parts).files):
        own = tmp_path / f"host-{rank}"
        shutil.copytree(parts, own, ignore=shutil.ignore_patterns(f"rank-{1 - rank:03d}-*"))
        assert len(list(own.glob("*.safetensors"))) == len(files)
    assert rank_pool(2).run(shards.differing, str(whole), str(tmp_path / "host-{}"), 2) == [[], []]


@pytest.mark.turns(2)
def test_another_number_of_processes(rank_pool, divided):
    _, _, parts = divided("llama", 2)
    with pytest.raises(ValueError, match="divided among 2 ranks, and this is one process: .* --nproc-per-node 2"):
        accel.load(parts)
    told = rank_pool(4).run(shards.refused, str(parts))
    assert all("divided among 2 ranks, and there are 4" in one for one in told)


def damaged(file, how: str) -> None:
    data = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    elif how == "cut":
        file.write_bytes(data[:-8])
    else:
        data[-3] ^= 64  # of a weight
        file.write_bytes(data)


@pytest.mark.share(3)
@pytest.mark.parametrize("how", ["missing", "cut", "other bytes"])
@pytest.mark.parametrize("scheme", [None, "int8"])
def test_a_shard_that_is_damaged_is_named_on_all_ranks(how, scheme, rank_pool, divided):
    _, _, parts = divided("llama", 2, scheme)
    file = parts / next(one.name for one in read_manifest(parts).files[1] if "layers.1.mlp" in str(one.checksums))
    damaged(file, how)
    told = rank_pool(2).run(shards.refused, str(parts))
    word = "is missing" if how == "missing" else "is damaged"
    assert all(str(file) in one and word in one for one in told), told


def test_a_manifest_that_is_not_understood(rank_pool, divided):
    _, _, parts = divided("llama", 2)
    told = rank_pool(2).run(shards.refused, str(parts), "", "cpu")[0]
    assert "device='cpu'" in told and "the device of its number" in told
    file = parts / MANIFEST
    before = json.loads(file.read_text())
    for change, word in (
        ({"version": 2}, "is of version 2; 1 is read"),
        ({"files": before["files"][:1]}, "another number of ranks than 2"),
        ({"tensors": {"a": {"dtype": "F33", "shape": [], "divided": None}}}, "is damaged: KeyError: 'F33'"),
    ):
        file.write_text(json.dumps(before | change))
        with pytest.raises(ValueError, match=word):
            accel.load(parts)


def test_weights_divided_in_another_way_are_refused(rank_pool, divided):
    """As by another version of transformers, whose plan is another."""
    _, _, parts = divided("llama", 2)
    file = parts / MANIFEST
    told = json.loads(file.read_text())
    name = "model.layers.0.mlp.down_proj.weight"
    told["tensors"][name]["divided"]["spans"].reverse()
    file.write_text(json.dumps(told))
    for one in rank_pool(2).run(shards.refused, str(parts)):
        assert name in one and "divide the weights again" in one


DEEP = {"num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 256}


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
