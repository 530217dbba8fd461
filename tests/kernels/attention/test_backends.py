"""The chooser of attention backends, as far as it goes without a GPU."""

import contextlib
import copy
import json
import pickle

import pytest
import torch
from accel_kernels import autotune
from accel_kernels.attention import backends as module
from accel_kernels.attention.backends import BACKENDS, AttentionChooser
from accel_kernels.autotune import TensorForm
from accel_kernels.trials import Trials


def qkv(dim=8):
    return tuple(torch.randn(2, 3, 5, dim) for _ in range(3))


def test_on_cpu_it_is_sdpa():
    q, k, v = qkv()
    chooser = AttentionChooser()
    assert chooser.choose(q, k, v) == "sdpa"
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(chooser(q, k, v), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient", "triton"])
def test_a_backend_asked_for_by_name_says_why_it_cannot_run(name):
    with pytest.raises(ValueError, match=f"attention='{name}'.*CUDA"):
        AttentionChooser(name)(*qkv())
    with pytest.raises(ValueError, match="'fast' is not one of auto, cudnn, flash"):
        AttentionChooser("fast")
    assert "meta" in BACKENDS["flash"].refuses(*(t.to("meta") for t in qkv(dim=12)))


def test_copies_start_without_choices_and_keep_the_preference(tmp_path):
    chooser = AttentionChooser("auto", tmp_path / "choices.json")
    chooser.choices["shape"] = "flash"
    for twin in (copy.deepcopy(chooser), pickle.loads(pickle.dumps(chooser))):
        assert twin.choices == {} and twin.cache == chooser.cache and twin.preference == "auto"


class OnGpu:
    """What the chooser reads of a CUDA tensor, without a GPU."""

    is_cuda, dtype, device = True, torch.float16, torch.device("cuda", 0)

    def __init__(self, *shape):
        self.shape = shape

    def stride(self, axis=None):
        whole = torch.empty(self.shape[0], self.shape[2], self.shape[1], self.shape[3], device="meta").transpose(1, 2)
        return whole.stride() if axis is None else whole.stride(axis)

    def __getitem__(self, index):
        return self

    def untyped_storage(self):
        return torch.empty(1).untyped_storage()

    def storage_offset(self):
        return 0


IMAGE = (2, 3, 500, 8)


@pytest.fixture
def measured(monkeypatch):
    """Choosers that believe in a GPU, on which cuDNN is the fastest; the names that raced or were tried so far."""
    found = []

    def agrees(name, other, forms):
        found.append(name)
        return name != "efficient"

    def race(runs):
        names = [name for run in runs for name, backend in BACKENDS.items() if run.func is backend.run]
        found.append(tuple(names))
        return [float(name != "cudnn") for name in names]

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(module, "_agrees", agrees)
    monkeypatch.setattr(autotune, "race", race)
    monkeypatch.setattr(module, "filled", lambda forms: [None] * len(forms))
    for name in ("triton", "xformers"):
        monkeypatch.setitem(BACKENDS, name, BACKENDS[name]._replace(refuses=lambda q, k, v: "not here"))
    return found


def choose(chooser, *shape, keys=None):
    q = OnGpu(*shape)
    k = q if keys is None else OnGpu(*shape[:2], keys, shape[3])
    return chooser.choose(q, k, k)


def test_a_choice_is_measured_once_and_kept_on_disk(tmp_path, measured):
    path = tmp_path / "deep" / "choices.json"
    first = AttentionChooser("auto", path)
    assert [choose(first, *IMAGE) for _ in range(2)] == ["cudnn", "cudnn"]
    assert measured == ["cudnn", "flash", "efficient", ("cudnn", "flash")]  # what disagrees does not race
    measured.clear()
    assert choose(AttentionChooser("auto", path), *IMAGE) == "cudnn"
    assert measured == ["cudnn"]


def test_what_one_size_taught_serves_its_neighbors(tmp_path, measured):
    path = tmp_path / "choices.json"
    chooser = AttentionChooser("auto", path)
    choose(chooser, *IMAGE)
    for shape in ((2, 3, 1000, 8), (4, 3, 300, 8), (1, 3, 500, 8)):
        measured.clear()
        assert choose(chooser, *shape) == "cudnn" and measured == ["cudnn"]  # tried, as it is new, and nothing raced
    measured.clear()
    for shape, keys in (((2, 3, 500, 16), None), ((2, 3, 5000, 8), None), ((2, 3, 500, 8), 77)):
        choose(chooser, *shape, keys=keys)  # another dimension, far away, or a prompt's few keys
    assert sum(type(entry) is tuple for entry in measured) == 2 and chooser.choices != chooser.measured
    assert len(json.loads(path.read_text())) == len(chooser.measured) == 4  # what was only taken over is not kept
    measured.clear()
    assert choose(AttentionChooser("auto", path), 2, 3, 600, 8) == "cudnn" and measured == ["cudnn"]


def test_measuring_is_put_off_where_somebody_collects_it(measured):
    chooser, trials = AttentionChooser(), Trials()
    with trials.noting() as asked:
        assert choose(chooser, *IMAGE) == "flash" and not measured  # needs no plan, so it runs until that is known
        choose(chooser, *IMAGE)
    assert len(asked) == 1 and trials.work(asked) == []
    assert choose(chooser, *IMAGE) == "cudnn"


def test_nothing_is_put_off_where_equal_calls_must_give_equal_bits(measured, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with Trials().noting() as asked:
        assert choose(AttentionChooser(), *IMAGE) == "cudnn" and not asked


def test_what_fails_leaves_what_ran_so_far(measured, monkeypatch, tmp_path):
    def fail(*args):
        raise torch.OutOfMemoryError("no memory for it")

    monkeypatch.setattr(autotune, "race", fail)
    chooser = AttentionChooser("auto", tmp_path / "choices.json")
    assert choose(chooser, *IMAGE) == "flash" and not chooser.measured and not chooser.cache.exists()


@pytest.mark.parametrize("content", ["{ damaged", "[]", "no such backend", "a backend that cannot run any more"])
def test_what_is_on_disk_is_not_trusted(tmp_path, measured, content):
    path = tmp_path / "choices.json"
    choose(AttentionChooser("auto", path), *IMAGE)
    (key,) = json.loads(path.read_text())
    if content in ("{ damaged", "[]"):
        path.write_text(content)
    elif content == "no such backend":
        path.write_text(json.dumps({key: content, "another form": 3}))
    else:
        path.write_text(json.dumps({key: "xformers", "another form": "cudnn"}))
    assert choose(AttentionChooser("auto", path), *IMAGE) == "cudnn"
    assert sum(type(entry) is tuple for entry in measured) == 2
    assert json.loads(path.read_text())[key] == "cudnn"
    assert ("another form" in path.read_text()) == content.startswith("a backend that")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_what_agrees(dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())

    def off_in_one_head(by):
        def run(q, k, v, scale):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v).clone()
            out[1, 2, -1, -1] += by
            return out

        return BACKENDS["sdpa"]._replace(run=run)

    forms = [TensorForm.of(one.to(dtype)) for one in qkv()]
    for by, agrees in ((0.0, True), (1e-4, True), (1.0, False), (float("nan"), False), (float("inf"), False)):
        monkeypatch.setitem(BACKENDS, "another", off_in_one_head(by))
        assert module._agrees("another", "sdpa", forms) == agrees


@pytest.mark.parametrize(("tokens", "loaded"), [(7, 1024), (1024, 1024), (1100, 1100), (4096, 1024), (40000, 1088)])
def test_a_warmup_loads_kernels_for_a_length_of_its_kind_in_little_memory(tokens, loaded, monkeypatch):
    found = []
    monkeypatch.setattr(module, "alongside", found.append)
    monkeypatch.setitem(BACKENDS, "cudnn", BACKENDS["cudnn"]._replace(refuses=lambda q, k, v: None))
    q = torch.empty(16, 3, tokens, 64, dtype=torch.float16, device="meta")
    chooser = AttentionChooser()
    assert {chooser._warm_up(q, q, q).shape for _ in range(2)} == {q.shape}
    ((x,),) = (work.args for work in found)
    assert x.shape == (1, 3, loaded, 64) and x.untyped_storage().nbytes() == x.nbytes
