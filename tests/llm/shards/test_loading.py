"""Divided weights loaded by ranks: what transformers' own loading gives, from a rank's own files; what is refused."""

import json
import shutil

import pytest

import accel
from accel.llm.shards.divide import divide
from accel.llm.shards.manifest import MANIFEST, read_manifest
from support import shards
from support.llm import families

STEPS = 6
TWO = ("llama-biases", "llama-tied", "qwen3", "gemma2", "gpt-neox", "mixtral", "qwen3-moe")
FOUR = ("llama-mha",)
# Groups of 32 columns fit into halves and quarters.
WIDE = {"hidden_size": 128, "intermediate_size": 256}
SCHEMES = (
    ("llama-biases", "int8", 2, {}), ("llama", "int4-g32-asym", 2, WIDE), ("qwen3", "fp8-head", 2, {}),
    ("llama-mha", "int4-g32", 4, WIDE),
)  # fmt: skip


def call() -> dict:
    ids, mask = families.padded((9, 5))
    return {"input_ids": ids, "attention_mask": mask, "max_new_tokens": STEPS, "do_sample": False}


@pytest.fixture
def divided(tmp_path):
    """The model of a family, loaded from a folder, and the folder with its parts."""

    def made(name: str, ranks: int, scheme: str | None = None, **changes):
        whole, parts = tmp_path / name, tmp_path / f"{name}-parts"
        model = families.make(name, **{"vocab_size": families.EVEN_VOCAB} | changes)
        if scheme is None:
            model.save_pretrained(whole)
        else:
            accel.quantize(model, scheme, out=whole)
        divide(whole, parts, ranks)
        return accel.load(whole), whole, parts

    return made


def expect(found: list[dict], model) -> None:
    tokens = model.generate(**call()).tolist()
    for one in found:
        assert one["optimized"] == one["stock"] == [tokens]
        assert one["fallbacks"] == [] and one["restored"] and one["with gradients"] < 1e-5
        rules = {(path, rule, status) for path, rule, status, _ in one["sites"]}
        for layer in families.layers(model):
            assert (layer, "decoder layer", "patched") in rules


@pytest.mark.parametrize(("name", "ranks"), [*((name, 2) for name in TWO), *((name, 4) for name in FOUR)])
def test_ranks_get_what_transformers_gives_them(name, ranks, rank_pool, divided):
    model, whole, parts = divided(name, ranks)
    assert rank_pool(ranks).run(shards.differing, str(whole), str(parts), ranks) == [[]] * ranks
    expect(rank_pool(ranks).run(shards.write, str(parts), [call()]), model)


@pytest.mark.parametrize(("name", "scheme", "ranks", "changes"), SCHEMES)
def test_quantized_weights(name, scheme, ranks, changes, rank_pool, divided):
    model, _, parts = divided(name, ranks, scheme, **changes)
    found = rank_pool(ranks).run(shards.write, str(parts), [call()])
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
