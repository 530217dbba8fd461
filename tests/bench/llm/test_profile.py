"""`accel profile`: what each part of a step takes, and whose a launch is."""

import json
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from accel.bench.llm import profile
from support.command_line import run_command


@pytest.mark.parametrize("more", [(), ("--stock",)], ids=["accel", "stock"])
def test_a_profile(more):
    result = run_command("profile", "tiny", "--context", "32", "--device", "cpu", "--json", *more)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout[result.stdout.index("{") :])
    rows = {row["part"]: row for row in figures["rows"]}
    assert list(rows) == ["QKV", "attention", "out", "gate and up", "down", "head", "norms and rest"]
    assert all(row["ms"] > 0 and row["launches"] > 0 for row in rows.values())
    assert rows["head"]["mb"] == pytest.approx(256 * 32 * 4 / 1e6, abs=1e-3)
    least = sum(row["least_ms"] for row in rows.values())
    assert figures["bound_ms"] == pytest.approx(least, rel=0.05, abs=1e-3)
    assert figures["step_ms"] > 0 and figures["kernels"][0]["us"] >= figures["kernels"][-1]["us"]


def test_a_profile_as_tables():
    result = run_command("profile", "tiny", "--context", "8", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert all(word in result.output for word in ("gate and up", "of its ms", "under generate()", "aten::"))
    assert run_command("profile", "nothing-here", "--device", "cpu").exit_code == 2


def on_gpu(name, start, end):
    return SimpleNamespace(name=name, device_type=DeviceType.CUDA, time_range=SimpleNamespace(start=start, end=end))


def test_launches_take_the_role_of_the_marks_they_lie_between():
    mark = "at::cuda::(anonymous namespace)::spin_kernel(long)"
    names = ["fill", mark, "gemv", "reduce", mark, "copy", mark, "gemv", mark]
    events = [on_gpu(name, 10 * at, 10 * at + at) for at, name in enumerate(names)]
    events = [*events[::-1], on_gpu("accel: QKV", 0, 99), SimpleNamespace(name="x", device_type=DeviceType.CPU)]
    found = profile.launches(events, ["QKV", "down"])
    assert [(kernel.name, kernel.us, kernel.role) for kernel in found] == [
        ("fill", 0, None), ("gemv", 2, "QKV"), ("reduce", 3, "QKV"), ("copy", 5, None), ("gemv", 7, "down")
    ]  # fmt: skip
    assert {kernel.role for kernel in profile.launches(events, ["QKV"])} == {None}


def test_a_graphs_launches_take_the_roles_of_the_same_ones_outside():
    def kernels(*pairs):
        return [profile.Kernel(name, 1.0, role) for name, role in pairs]

    known = kernels(("gemv", "QKV"), ("paged_attention", "attention"), ("gemv", "out"), ("copy", None), ("mm", "head"))
    replayed = kernels(
        ("gemv", None), ("paged_attention", None), ("gemv", None), ("mm", None), ("mm", None), ("new", None)
    )
    roles = [kernel.role for kernel in profile._assigned(replayed, known)]
    assert roles == ["QKV", "attention", "out", "head", "head", None]
