"""Measuring in parts: as much as there is time for, in the order in which it was asked for."""

import contextlib
import json
import threading
import time

import pytest
import torch
from accel_kernels import autotune
from accel_kernels import trials as module
from accel_kernels.gemm.linear import LinearChooser
from accel_kernels.trials import Trials, put_off


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when a trial says so."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def asked_for(trials, clock, parts: dict, done: list):
    """Asks for trials of so many parts, which take as many seconds each."""

    def trial(name, seconds):
        for each in seconds:
            clock[0] += each
            yield
        done.append(name)

    with trials.noting() as asked:
        for name, seconds in parts.items():
            assert put_off(name, lambda name=name, seconds=seconds: trial(name, seconds))
    return asked


def test_no_more_than_a_part_is_measured_beyond_the_time_there_is(clock):
    trials, done = Trials(), []
    asked = asked_for(trials, clock, {"a": [0.06, 0.06], "b": [0.06, 0.01], "c": []}, done)
    assert list(asked) == ["a", "b", "c"] and clock[0] == 0
    assert trials.work(asked, 0.1) == ["a", "b", "c"] and clock[0] == pytest.approx(0.12)
    assert trials.work(asked, 0.1) == [] and done == ["a", "b", "c"] and not trials.waiting


def test_only_what_is_wanted_is_worked_at(clock):
    trials, done = Trials(), []
    one = asked_for(trials, clock, {"a": [1.0]}, done)
    two = asked_for(trials, clock, {"b": [1.0], "a": [1.0]}, done)  # the same trial goes on waiting
    assert trials.work(two) == [] and done == ["b", "a"]
    assert trials.open(one) == [] and trials.work(one) == []


def test_nobody_collects_outside(clock):
    trials = Trials()
    with trials.noting():
        pass
    assert not put_off("a", lambda: pytest.fail("made")) and not trials.waiting


def test_another_thread_does_not_measure_meanwhile(clock):
    trials, done = Trials(), []
    asked = asked_for(trials, clock, {"a": [], "b": []}, done)
    module._TURN.acquire()
    try:
        found = []
        thread = threading.Thread(target=lambda: found.extend(trials.work(asked)))
        thread.start()
        thread.join()
        assert found == ["a", "b"] and not done
    finally:
        module._TURN.release()


def test_the_list_of_those_that_wait_is_bounded(clock, monkeypatch):
    monkeypatch.setattr(module, "MOST", 2)
    trials, done = Trials(), []
    asked = asked_for(trials, clock, {"a": [], "b": [], "c": []}, done)
    assert trials.work(asked) == [] and done == ["b", "c"]


def test_products_torch_multiplies_best_teach_their_neighbors(tmp_path):
    chooser = LinearChooser(tmp_path / "linear.json")
    chooser.learn("1024x320x320 float16", "torch")
    chooser.learn("1024x640x320 float16", "2")
    assert chooser.neighbor("2048x320x320 float16", 2.0) == "torch"
    assert chooser.neighbor("2049x320x320 float16", 2.0) is None
    assert chooser.neighbor("1024x320x320 float16 bias", 2.0) is None
    assert chooser.neighbor("900x640x320 float16", 2.0) == "2"  # whose number means another algorithm there
    chooser.adopt("2000x320x320 float16", "torch")
    assert chooser.neighbor("4000x320x320 float16", 2.0) is None  # a choice taken over teaches nothing


class Product:
    algorithms = [None] * 3


@pytest.fixture
def linears(monkeypatch, tmp_path):
    """A chooser that believes in a GPU; [whether it is captured]."""
    chooser, capturing = LinearChooser(tmp_path / "linear.json"), [False]
    monkeypatch.setattr(chooser, "broken", False)
    monkeypatch.setattr(chooser, "_refuses", lambda *args: False)
    monkeypatch.setattr(chooser, "_product", lambda key, *args: chooser.products.setdefault(key, Product()))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return chooser, capturing


def test_a_residual_is_part_of_the_product(monkeypatch, linears):
    (chooser, _), ran = linears, []
    monkeypatch.setattr(chooser, "_agrees", lambda product, rank, *args: ran.append(args) or True)
    monkeypatch.setattr(autotune, "race", lambda runs: [9.0, 9.0, 8.0, 9.0])
    x, weight, bias, residual = torch.randn(2, 5, 8), torch.randn(16, 8), torch.randn(16), torch.randn(2, 5, 16)
    for shift in (None, bias):
        wanted = residual + torch.nn.functional.linear(x, weight, shift)
        torch.testing.assert_close(chooser(x, weight, shift, residual), wanted)
    assert chooser.choices == {"10x16x8 float32 residual": "1", "10x16x8 float32 bias residual": "1"}
    assert [[None if t is None else tuple(t.shape) for t in args[:4]] for args in ran[::3]] == [
        [(10, 8), (16, 8), None, (10, 16)], [(10, 8), (16, 8), (16,), (10, 16)]
    ]  # fmt: skip


def test_products_are_measured_later_and_the_fastest_algorithm_runs_in_graphs(monkeypatch, linears):
    """The race is told: the last algorithm wins, and the second disagrees with torch."""
    (chooser, capturing), ran = linears, []
    monkeypatch.setattr(chooser, "_agrees", lambda product, rank, *args: ran.append(rank) or rank != 1)
    monkeypatch.setattr(autotune, "race", lambda runs: [9.0, 9.0, 8.0][: len(runs)])
    monkeypatch.setattr(chooser, "_run", lambda product, rank, *args: rank)
    x, weight, trials = torch.randn(2, 5, 8), torch.randn(16, 8), Trials()
    wanted = torch.nn.functional.linear(x, weight)
    with trials.noting() as asked:
        assert torch.equal(chooser(x, weight), wanted) and not ran
        capturing[0] = True
        assert torch.equal(chooser(x, weight), wanted)  # not known yet: torch's
    assert trials.work(asked) == [] and ran == [0, 1, 2]
    assert chooser(x, weight) == 2
    assert json.loads(chooser.cache.read_text()) == {"10x16x8 float32": "2"}
    again = LinearChooser(chooser.cache)
    assert again.stored("10x16x8 float32") == "2" == again.neighbor("11x16x8 float32", 2.0)
