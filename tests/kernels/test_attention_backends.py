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


class OnGpu:
    """What the chooser reads of a CUDA tensor, without a GPU."""

    is_cuda, dtype, shape = True, torch.float16, (2, 3, 5, 8)

    def stride(self, axis):
        return 24


@pytest.fixture
def measured(monkeypatch):
    """Choosers that believe in a GPU, and measure `flash` as the fastest; the shapes measured so far."""
    shapes = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(AttentionChooser, "_measure", lambda self, q, k, v: shapes.append(q.shape) or "flash")
    return shapes


def test_a_choice_is_measured_once_and_kept_on_disk(tmp_path, measured):
    path, t = tmp_path / "deep" / "choices.json", OnGpu()
    first = AttentionChooser("auto", path)
    assert [first.choose(t, t, t) for _ in range(2)] == ["flash", "flash"]
    assert AttentionChooser("auto", path).choose(t, t, t) == "flash"
    assert len(measured) == 1


@pytest.mark.parametrize("content", ["{ damaged", "no such backend", "a backend that cannot run any more"])
def test_what_is_on_disk_is_not_trusted(tmp_path, measured, monkeypatch, content):
    path, t = tmp_path / "choices.json", OnGpu()
    AttentionChooser("auto", path).choose(t, t, t)
    (key,) = json.loads(path.read_text())
    if content == "{ damaged":
        path.write_text(content)
    elif content == "no such backend":
        path.write_text(json.dumps({key: content}))
    else:
        path.write_text(json.dumps({key: "xformers", "another shape": "cudnn"}))
        monkeypatch.setitem(BACKENDS, "xformers", BACKENDS["xformers"]._replace(refuses=lambda q, k, v: "uninstalled"))
    assert AttentionChooser("auto", path).choose(t, t, t) == "flash"
    assert len(measured) == 2
    assert json.loads(path.read_text())[key] == "flash"
    assert ("another shape" in path.read_text()) == content.startswith("a backend that")
