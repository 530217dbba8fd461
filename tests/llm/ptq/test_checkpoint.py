"""accel.quantize killed while it writes a file: the same command goes on, and what it saves is the same to the byte."""

import copy
import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

import accel
from accel.llm.ptq import checkpoint
from accel.llm.ptq.formats.saving import SaveOverride
from support.llm.families import make

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


def test_killed_twice_in_the_same_file(killed, whole, tmp_path):
    for _ in range(2):
        killed("model.layers.1.safetensors", lambda: quantized("rtn", "int8", tmp_path / "out"))
    assert quantized("rtn", "int8", tmp_path / "out") == whole("rtn", "int8")


def test_killed_before_the_first_byte(whole, tmp_path):
    (tmp_path / "out" / "unfinished").mkdir(parents=True)
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


ALIKE = ("unfinished", "unfinished/mine.txt", "run.json.part", "mine/unfinished/run.json.part")


@pytest.mark.parametrize("mine", ALIKE)
def test_what_only_looks_alike_is_left_alone(mine, tmp_path):
    file = tmp_path / "out" / mine
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(ValueError, match="is not empty and holds no interrupted run"):
        quantized("rtn", "int8", tmp_path / "out")
    assert contents(tmp_path / "out") == {mine: b"mine"}
