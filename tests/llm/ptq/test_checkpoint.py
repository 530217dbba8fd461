"""Checkpoints of a calibration, and runs that go on from them."""

import copy
import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

import accel
from accel.llm.ptq import checkpoint
from accel.llm.ptq import run as running
from accel.llm.ptq.formats.saving import SaveOverride
from support.everything import EVERYTHING
from support.llm.families import make
from support.llm.quantized import held_by, logits

IDS = [torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
WRITES = ("run.json", "model.layers.0.safetensors", "model.layers.1.safetensors", "model.layers.2.safetensors")


class Killed(BaseException):
    pass


def contents(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def quantized(method: str, scheme: str, out) -> dict[str, bytes]:
    data = None if method == "rtn" else IDS
    accel.quantize(make("llama", num_hidden_layers=3), scheme, data, method=method, out=out)
    return contents(out)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """whole(method, scheme): the files of a run that nothing interrupted."""
    found = {}

    def of(*how: str) -> dict[str, bytes]:
        if how not in found:
            found[how] = quantized(*how, tmp_path_factory.mktemp("whole") / "out")
        return found[how]

    return of


@pytest.fixture
def killed(monkeypatch):
    """killed(name, call): the call as far as half of the file of this name, before that gets its name."""
    real = os.replace

    def run(name: str, call) -> None:
        def replace(part, path):
            if path.name == name:
                os.truncate(part, part.stat().st_size // 2)
                raise Killed
            real(part, path)

        with monkeypatch.context() as patches, pytest.raises(Killed):
            patches.setattr(os, "replace", replace)
            call()

    return run


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("how", [("rtn", "int8"), ("gptq", "int4-g32-asym")], ids="-".join)
def test_killed_in_the_middle_of_a_file_it_goes_on_to_the_same_bytes(how, name, killed, whole, tmp_path):
    out = tmp_path / "out"
    killed(name, lambda: quantized(*how, out))
    done, (half,) = WRITES[: WRITES.index(name)], contents(out).keys() - {f"unfinished/{one}" for one in WRITES}
    assert contents(out).keys() == {f"unfinished/{one}" for one in done} | {half} and name in half
    assert quantized(*how, out) == whole(*how)


@pytest.mark.parametrize("times", [0, 2])
def test_killed_before_the_first_byte_or_twice_in_the_same_file(times, killed, whole, tmp_path):
    (tmp_path / "out" / "unfinished").mkdir(parents=True)
    for _ in range(times):
        killed("model.layers.1.safetensors", lambda: quantized("rtn", "int8", tmp_path / "out"))
    assert quantized("rtn", "int8", tmp_path / "out") == whole("rtn", "int8")


FULL = (  # what writes, and which time it fails
    *((os, "replace", time) for time in (0, 2)),
    *((checkpoint, "save_file", time) for time in (0, 1)),
    (os, "fsync", 0),
    (Path, "mkdir", 0),
    (SaveOverride, "__call__", 0),
    (shutil, "rmtree", 0),
)


@pytest.mark.share(1)
@pytest.mark.parametrize(("place", "name", "time"), FULL, ids=lambda one: getattr(one, "__name__", str(one)))
@pytest.mark.turns(2)
def test_on_a_full_disk_it_raises_and_the_same_call_goes_on(place, name, time, whole, tmp_path, monkeypatch):
    """On the same model, in the same folder; or in another one, as there may be no more room there."""
    calls, real, first = [], getattr(place, name), make("llama", num_hidden_layers=3)

    def full(*args, **given):
        calls.append(args)
        if len(calls) == time + 1:
            if name == "save_file":
                args[1].write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **given)

    for where in ("out", "other"):
        model, out = copy.deepcopy(first), tmp_path / where / "first"
        out.parent.mkdir()
        calls.clear()
        with monkeypatch.context() as patches, pytest.raises(OSError, match="No space"):
            patches.setattr(place, name, full)
            accel.quantize(model, "int8", out=out)
        assert not list(out.rglob("*.part"))
        if not any(type(module).__name__ == "QuantizedLinear" for module in model.modules()):
            assert all(map(torch.equal, model.state_dict().values(), first.state_dict().values()))
        out = out if where == "out" else tmp_path / where / "second"
        assert accel.quantize(model, "int8", out=out) is model and contents(out) == whole("rtn", "int8")
        with pytest.raises(ValueError):  # quantized, and saved
            accel.quantize(model, "int8", out=tmp_path / "third")


ALIKE = ("mine.txt", "unfinished", "unfinished/mine.txt", "run.json.part", "mine/unfinished/run.json.part")


@pytest.mark.parametrize("mine", ALIKE)
def test_what_only_looks_alike_is_left_alone(mine, tmp_path):
    file = tmp_path / "out" / mine
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(ValueError, match="is not empty and holds no interrupted run"):
        quantized("rtn", "int8", tmp_path / "out")
    assert contents(tmp_path / "out") == {mine: b"mine"}


@pytest.fixture
def interrupted(monkeypatch):
    """interrupted(n): the n-th layer is never done."""

    def after(count: int):
        real = running.quantize_layers

        def quantize_layers(*given):
            for number, result in enumerate(real(*given)):
                if number == count:
                    raise KeyboardInterrupt
                yield result

        monkeypatch.setattr(running, "quantize_layers", quantize_layers)

    yield after


METHODS = [("rtn", "int8"), ("rtn", "fp8"), ("gptq", "int4-g32-asym"), ("awq", "int4-g32"), ("smoothquant", "int8")]


@pytest.mark.parametrize(
    ("method", "scheme", "done"),
    [(*how, done) for how in METHODS for done in (1, 2) if EVERYTHING or done == 1 or how[0] == "smoothquant"],
)
@pytest.mark.share(3)
@pytest.mark.turns(2)
def test_a_second_run_goes_on(done, method, scheme, tmp_path, interrupted, monkeypatch, tiny):
    out, model = tmp_path / "out", make("llama", num_hidden_layers=3)
    data = None if method == "rtn" else IDS
    before = tiny.snapshot(model)
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    interrupted(done)
    with pytest.raises(KeyboardInterrupt):
        accel.quantize(model, scheme, data, method=method, out=out)
    monkeypatch.undo()
    assert before.keys() == tiny.snapshot(model).keys() and not held_by(model)
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())
    written = sorted(path.name for path in (out / "unfinished").iterdir())
    assert written == [f"model.layers.{number}.safetensors" for number in range(done)] + ["run.json"]
    known = []
    real = running.quantize_layers

    def quantize_layers(*given):
        known.extend(given[4])
        return real(*given)

    monkeypatch.setattr(running, "quantize_layers", quantize_layers)
    accel.quantize(model, scheme, data, method=method, out=out)
    assert known == [f"model.layers.{number}" for number in range(done)]
    assert not (out / "unfinished").exists()
    whole = accel.quantize(make("llama", num_hidden_layers=3), scheme, data, method=method)
    assert torch.equal(logits(model)["logits"], logits(whole)["logits"])
    assert torch.equal(logits(accel.load(out))["logits"], logits(whole)["logits"])


@pytest.fixture
def stopped(tmp_path, interrupted, method_with_data):
    """A folder with an interrupted run of a llama with method gptq."""
    interrupted(1)
    with pytest.raises(KeyboardInterrupt):
        accel.quantize(make("llama"), "int8", IDS, method="gptq", out=tmp_path / "out")
    return tmp_path / "out"


def test_another_run_is_refused_and_the_difference_named(stopped, tiny):
    other = make("llama")
    other.model.layers[1].mlp.up_proj.weight.data += 1e-3
    one_token_changed = IDS[2].clone()
    one_token_changed[1, 11] += 1
    others = [
        (make("llama"), "int4-g32", IDS, "gptq", "another scheme: int8, now int4-g32"),
        (make("llama"), "int8", IDS[:2], "gptq", "another calibration: "),
        (make("llama"), "int8", [IDS[0], IDS[1], one_token_changed], "gptq", "another calibration: "),
        (make("llama"), "int8", [IDS[1], IDS[0], IDS[2]], "gptq", "another calibration: "),
        (make("llama"), "int8", IDS, "awq", "another method: gptq, now awq"),
        (other, "int8", IDS, "gptq", "another model: "),
        (make("llama", rms_norm_eps=1e-3), "int8", IDS, "gptq", "another model: "),
    ]
    written = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    for model, scheme, data, method, message in others:
        before = tiny.snapshot(model)
        with pytest.raises(ValueError, match=message):
            accel.quantize(model, scheme, data, method=method, out=stopped)
        tiny.assert_same_state(before, tiny.snapshot(model))
    assert written == {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}


@pytest.mark.parametrize("damage", ["truncated", "foreign", "another shape", "garbled run"])
def test_damaged_layers_are_named_before_anything_changes(damage, stopped, tiny):
    from safetensors.torch import load_file, save_file

    file = stopped / "unfinished" / "model.layers.0.safetensors"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "foreign":
        save_file({"weights/model.layers.0.mlp.up_proj/data": torch.ones(2, 2)}, file)
    elif damage == "another shape":
        tensors = load_file(file)
        name = "weights/model.layers.0.mlp.up_proj/"
        tensors |= {name + "data": tensors[name + "data"][:8].clone(), name + "scales": tensors[name + "scales"][:8]}
        save_file(tensors, file)
    else:
        (stopped / "unfinished" / "run.json").write_text("[")
    model = make("llama")
    before = tiny.snapshot(model)
    message = {
        "truncated": r"model.layers.0.safetensors is damaged .*delete it",
        "foreign": r"model.layers.0.safetensors is no layer of a run",
        "another shape": r"mlp.up_proj is \(96, 64\) in the model and \(8, 64\) in the result",
        "garbled run": r"run.json is damaged; delete the folder",
    }[damage]
    with pytest.raises(ValueError, match=message):
        accel.quantize(model, "int8", IDS, method="gptq", out=stopped)
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("mine")
    model = make("llama")
    with pytest.raises(ValueError, match="file is a file, not a folder"):
        accel.quantize(model, "int8", out=tmp_path / "file")
    assert not held_by(model)
    accel.quantize(model, "int8", out=tmp_path / "out")
    with pytest.raises(ValueError, match="out is not empty"):  # a finished run is no interrupted one
        accel.quantize(make("llama"), "int8", out=tmp_path / "out")
