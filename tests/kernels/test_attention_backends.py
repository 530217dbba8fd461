"""The chooser of attention backends, as far as it goes without a GPU."""

import copy
import json
import pickle

import pytest
import torch
from accel_kernels.attention_backends import BACKENDS, AttentionChooser


def qkv(dim=8):
    return tuple(torch.randn(2, 3, 5, dim) for _ in range(3))


def test_on_cpu_it_is_sdpa():
    q, k, v = qkv()
    chooser = AttentionChooser()
    assert chooser.choose(q, k, v) == "sdpa"
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(chooser(q, k, v), wanted, rtol=0, atol=0)


def test_an_unknown_backend_names_the_valid_ones():
    with pytest.raises(ValueError, match="'fast' is not one of auto, cudnn, flash"):
        AttentionChooser("fast")


@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient", "triton"])
def test_a_backend_asked_for_by_name_says_why_it_cannot_run(name):
    with pytest.raises(ValueError, match=f"attention='{name}'.*CUDA"):
        AttentionChooser(name)(*qkv())


def test_refusals_name_the_value():
    q, k, v = (t.to("meta") for t in qkv(dim=12))
    assert "meta" in BACKENDS["flash"].refuses(q, k, v)


def test_copies_start_without_choices_and_keep_the_preference(tmp_path):
    chooser = AttentionChooser("auto", tmp_path / "choices.json")
    chooser.choices["shape"] = "flash"
    for twin in (copy.deepcopy(chooser), pickle.loads(pickle.dumps(chooser))):
        assert twin.choices == {} and twin.cache == chooser.cache and twin.preference == "auto"


def test_choices_survive_on_disk_and_a_damaged_file_is_ignored(tmp_path):
    path = tmp_path / "deep" / "choices.json"
    first = AttentionChooser("auto", path)
    first.choices["shape"] = "flash"
    first._save()
    second = AttentionChooser("auto", path)
    second._load()
    assert second.choices == {"shape": "flash"}
    path.write_text(json.dumps({"shape": "no such backend"}))
    third = AttentionChooser("auto", path)
    third._load()
    assert third.choices == {}
    path.write_text("{ damaged")
    fourth = AttentionChooser("auto", path)
    fourth._load()
    assert fourth.choices == {}
