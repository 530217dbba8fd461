"""Files that processes share: nothing is lost, nothing is left behind, nothing raises."""

import errno
import fcntl
import json
import multiprocessing
import os
import pwd
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accel_kernels.attention.backends import AttentionChooser
from accel_kernels.caches.cache_file import CacheFile, cache_folder, replace_file
from accel_kernels.gemm.linear import LinearChooser
from accel_kernels.moe.chooser import ExpertsChooser

from accel.planning.plan import choices_file

KEYS = {
    AttentionChooser: "{}x3x500x500x8 float16 dense",
    LinearChooser: "{}x16x8 float16",
    ExpertsChooser: "{}x2x8x16x32 float16 rows",
}


def measure(path: Path, process: int, begin) -> None:
    """As choosers do, one choice after another."""
    chooser = LinearChooser(path)
    begin.wait()
    for shape in range(10):
        chooser.learn(f"{1 + shape + 10 * process}x16x8 float32", "torch")
        chooser._save()


@pytest.mark.parametrize("kind", ["processes", "threads without fcntl"])
def test_those_who_share_a_file_lose_nothing_of_one_another(tmp_path, kind, monkeypatch):
    path = tmp_path / "choices.json"
    if kind == "threads without fcntl":
        monkeypatch.setitem(sys.modules, "fcntl", None)
        monkeypatch.setitem(sys.modules, "msvcrt", FakeLocks())
    if kind == "processes":
        fork = multiprocessing.get_context("fork")
        begin, start = fork.Barrier(4), fork.Process
    else:
        begin, start = threading.Barrier(4), threading.Thread
    writers = [start(target=measure, args=(path, number, begin)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(json.loads(path.read_text())) == 40
    assert list(tmp_path.iterdir()) == [path]


class FakeLocks:
    """What Windows locks files by."""

    LK_NBLCK = 2

    def locking(self, file: int, mode: int, size: int) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError from None


@pytest.mark.share(1)
@pytest.mark.parametrize("left", ["", "no locks", "a lock of one that died"])
def test_a_later_process_adds_to_the_file(tmp_path, monkeypatch, left):
    path = tmp_path / "deep" / "choices.json"
    if left == "no locks":
        monkeypatch.setattr(fcntl, "flock", failing(errno.ENOSYS))
    assert CacheFile(path).add({"a": 1, "b": [1]})
    if left.startswith("a lock"):
        path.with_name(path.name + ".lock").touch()
    assert CacheFile(path).add({"b": [2]}) and CacheFile(path).add({})
    assert CacheFile(path).read() == {"a": 1, "b": [2]}
    assert list(path.parent.iterdir()) == [path]


def test_a_lock_that_is_not_given_back_costs_a_while_and_no_entry(tmp_path, monkeypatch):
    monkeypatch.setattr("accel_kernels.caches.cache_file.PATIENCE", 0.01)
    path = tmp_path / "choices.json"
    chooser = measured(path, "10x16x8 float16")
    with open(path.with_name(path.name + ".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        chooser.learn("20x16x8 float16", "torch")
        chooser._save()
        assert CacheFile(path).read() == {"10x16x8 float16": "torch"}
    chooser._save()
    assert len(CacheFile(path).read()) == 2


def failing(number: int):
    def fail(*args, **given):
        raise OSError(number, os.strerror(number))

    return fail


def measured(path: Path, key: str) -> LinearChooser:
    chooser = LinearChooser(path)
    chooser.learn(key, "torch")
    chooser._save()
    return chooser


@pytest.mark.share(1)
@pytest.mark.parametrize("fails", ["open", "write", "replace", "mkdir"])
def test_a_disk_that_fails_changes_nothing_and_the_next_time_all_is_written(tmp_path, monkeypatch, fails):
    path = tmp_path / "choices.json"
    chooser = measured(path, "10x16x8 float16")
    with monkeypatch.context() as patch:
        if fails == "write":  # the first bytes are written

            def write_text(self, text, **given):
                self.write_bytes(text.encode()[:20])
                failing(errno.ENOSPC)()

            patch.setattr(Path, "write_text", write_text)
        else:
            patch.setattr(*{"open": (os, "open"), "replace": (os, "replace"), "mkdir": (Path, "mkdir")}[fails],
                          failing(errno.EROFS))  # fmt: skip
        chooser.learn("20x16x8 float16", "1")
        chooser._save()
        assert list(tmp_path.iterdir()) == [path]
        assert CacheFile(path).read() == {"10x16x8 float16": "torch"}
    chooser.learn("30x16x8 float16", "2")
    chooser._save()
    assert len(CacheFile(path).read()) == 3


def test_a_file_that_cannot_be_read_now_is_not_written_over(tmp_path, monkeypatch):
    path = tmp_path / "choices.json"
    measured(path, "10x16x8 float16")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", failing(errno.EIO))
        measured(path, "20x16x8 float16")
    assert CacheFile(path).read() == {"10x16x8 float16": "torch"}


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_file_is_replaced_as_a_whole(tmp_path, error):
    path = tmp_path / "file"
    replace_file(path, lambda part: part.write_text("whole"))

    def write(part: Path) -> None:
        part.write_text("half")
        raise error

    with pytest.raises(error):
        replace_file(path, write)
    assert path.read_text() == "whole" and list(tmp_path.iterdir()) == [path]


DAMAGED = {
    "empty": "",
    "cut off": '{"10x16x8 flo',
    "deep": "[" * 100_000,
    "deep object": '{"a":' * 100_000,
    "no object": "[1, 2]",
    "null": "null",
    "endless number": '{"a": %s}' % ("9" * 5000),
    "no text": b"\xff\x00\xfe",
    "values of other kinds": '{"10x16x8 float16": 3, "20x16x8 float16": null, "30x16x8 float16": ["torch"]}',
}


@pytest.mark.share(1)
@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_written_again(tmp_path, content):
    path = tmp_path / "choices.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    chooser = LinearChooser(path)
    assert chooser.stored("10x16x8 float16") is None and chooser.neighbor("10x16x8 float16", 4.0) is None
    chooser.learn("10x16x8 float16", "torch")
    chooser._save()
    assert CacheFile(path).read() == {"10x16x8 float16": "torch"}


@pytest.mark.share(1)
@pytest.mark.parametrize("size", ["0", "-8", "9" * 400, "x", "", "1.5", "1x1"])
@pytest.mark.parametrize("kind", KEYS)
def test_a_damaged_key_teaches_nothing(tmp_path, kind, size):
    path, form = tmp_path / "choices.json", KEYS[kind]
    assert CacheFile(path).add({form.format(size): "flash"})
    chooser = kind(cache=path)
    assert chooser.neighbor(form.format(8), 4.0) is None
    chooser.learn(form.format(8), "flash")
    assert chooser.neighbor(form.format(16), 4.0) in ("flash", None)


@pytest.mark.parametrize("stored", ["²", "9" * 5000, "2", "-1", "1"])
@pytest.mark.share(1)
def test_a_damaged_number_is_no_algorithm(stored, monkeypatch):
    monkeypatch.setattr(LinearChooser, "_product", lambda *given: SimpleNamespace(algorithms="ab"))
    x = torch.empty(8, 8)
    assert LinearChooser()._holds(stored, "8x8x8 float16", x, None, x, False, 8) == (stored == "1")


@pytest.mark.parametrize("folder", ["", "/somewhere/else"])
def test_a_user_without_a_home_has_no_cache(monkeypatch, folder):
    def unknown(*args):
        raise KeyError

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setenv("ACCEL_CACHE_DIR", folder)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a card")
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: 91900)  # a CUDA build asks the card
    assert cache_folder() == (Path(folder) if folder else None)
    found = choices_file("linear")
    assert (found and found.parent) == cache_folder()
    monkeypatch.setenv("ACCEL_CARD", "8.9")
    assert found is None or found.name != choices_file("linear").name
