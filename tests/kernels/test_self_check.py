"""Kernels that are refused, and those that check themselves: on made-up GPUs, with errors as Triton raises them."""

import dataclasses
import sys
from subprocess import CalledProcessError
from types import SimpleNamespace

import pytest
import torch
from accel_kernels import rms_norm, selective_scan
from accel_kernels.device import Card, replayed, triton_installed
from accel_kernels.errors import KernelRefused
from accel_kernels.op import Op
from accel_kernels.self_check import AGREES, UNCHECKED, kind_of
from accel_kernels.warmup import Warmup, launch

import accel
from support.llm.families import make

errors = pytest.importorskip("triton.runtime.errors")
compilation = pytest.importorskip("triton.compiler.errors")

CARD = Card("made up", (8, 6), 28, 99 * 1024)


def raised_in(module: str, error: Exception) -> Exception:
    """The error, as a module of this name raises it."""
    scope = {"__name__": module, "error": error}
    exec("def fail():\n    raise error", scope)
    with pytest.raises(type(error)) as raised:
        scope["fail"]()
    return raised.value


REFUSALS = [
    errors.OutOfResources(139264, 101376, "shared memory"),
    errors.PTXASError("Feature 'wgmma' requires .target sm_90a"),
    compilation.CompilationError("", None, "type fp8e4nv not supported in this architecture"),
    RuntimeError("PassManager::run failed"),
    RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
    raised_in("triton.knobs", RuntimeError("Cannot find ptxas")),
    raised_in("triton.runtime.build", CalledProcessError(1, ["gcc", "main.c"])),
    raised_in("triton.runtime.cache", PermissionError(13, "Permission denied")),
]
OTHERS = [
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    ValueError("of the caller"),
    raised_in("triton.backends.nvidia.driver", torch.OutOfMemoryError("CUDA out of memory")),
    raised_in("triton.runtime.jit", TypeError("dynamic_func() missing 1 required positional argument")),
]


class FakeKernel:
    """As Triton's, whose launches raise the error."""

    hash = "known"
    __name__ = "fake_kernel"

    def __init__(self, error: Exception):
        self.error, self.launches = error, 0

    def __getitem__(self, grid):
        self.launches += 1
        raise self.error


def op_of(kernel, **more) -> Op:
    """An operation with the reference x * 2, that says it runs on a GPU."""
    op = Op(
        "doubled", lambda x, out=None: x * 2 if out is None else torch.mul(x, 2, out=out), "", lambda *_: None, **more
    )
    vars(op)["triton"] = kernel
    return op


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
def test_a_refused_kernel_leaves_the_call_to_the_reference(error):
    kernel = FakeKernel(error)
    op = op_of(lambda x: launch(kernel, (1,), x, num_warps=4))
    for _ in range(3):
        assert torch.equal(op._on_gpu(torch.ones(2)), torch.full((2,), 2.0))
    assert kernel.launches == 1  # compiled once
    (told,) = op.outcomes.rows()
    assert told.startswith(f"fake_kernel was refused: {type(error).__name__}") and str(error).split("\n")[0] in told
    with pytest.raises(KernelRefused):  # another configuration is tried by itself
        launch(kernel, (1,), torch.ones(2), num_warps=8)
    assert kernel.launches == 2


def test_without_triton_the_reference_runs(monkeypatch):
    """As on Windows."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "accel_kernels.norm.rms_norm_triton", raising=False)
    op, x = dataclasses.replace(rms_norm), torch.randn(2, 8)
    assert torch.equal(op._on_gpu(x, torch.ones(8), 1e-6)[0], rms_norm.reference(x, torch.ones(8), 1e-6)[0])
    (told,) = op.outcomes.rows()
    assert told.startswith("rms_norm was refused: ModuleNotFoundError") and "triton" in told
    triton_installed.cache_clear()
    with Warmup().launches():
        assert not Card("made up", (8, 6), 28, 99 * 1024).features
    triton_installed.cache_clear()


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_are_told(error):
    kernel = FakeKernel(error)
    with pytest.raises(type(error)) as raised:
        op_of(lambda x: launch(kernel, (1,), x))._on_gpu(torch.ones(2))
    assert not isinstance(raised.value, KernelRefused)


def checked(op: Op, *args, **more):
    run = op.outcomes.run_checked
    with replayed(CARD):
        return run(op.triton, op.instead or op.reference, *args, **more)


def test_first_calls_are_compared():
    calls = []
    op = op_of(lambda x: calls.append(x.shape) or x + x)
    for rows in (3, 3, 2, 300):
        assert torch.equal(checked(op, x := torch.randn(rows)), 2 * x)
    assert list(op.outcomes.outcomes.values()) == [AGREES] * 2 and len(calls) == 4  # by sizes up to a power of two
    assert op.outcomes.rows() == ["no test ran on such a card: 2 kinds of calls checked, which agree"]


def test_what_the_reference_does_not_give_is_not_compared():
    """As channel stats, which `group_norm` reads."""
    op = dataclasses.replace(op_of(None), reference=lambda x: (2 * x, None))
    vars(op)["triton"] = lambda x: (x + x, (x.sum(), 3))
    for _ in range(2):
        y, stats = checked(op, x := torch.randn(4))
        assert torch.equal(y, 2 * x) and stats == (x.sum(), 3)
    assert op.outcomes.rows() == ["no test ran on such a card: 1 kinds of calls checked, which agree"]


@pytest.mark.parametrize("wrong", [lambda x: x * 2.1, lambda x: x * float("nan"), lambda x: (2 * x)[:1]])
def test_what_computes_something_else_is_not_run_again(wrong):
    calls = []
    op = op_of(lambda x: calls.append(1) or wrong(x))
    for _ in range(2):
        assert torch.equal(checked(op, x := torch.randn(4)), 2 * x)
    assert calls == [1] and "plain torch runs" in op.outcomes.rows()[0]


def test_what_is_written_is_compared_with_what_the_reference_writes():
    op = op_of(lambda x, out=None: out)  # writes nothing
    out = torch.zeros(4)
    assert checked(op, x := torch.randn(4), out=out) is out and torch.equal(out, 2 * x)
    assert "plain torch runs" in op.outcomes.rows()[0]


@pytest.mark.parametrize("right", [True, False])
def test_states_are_changed_once(right):
    case = next(case for case in selective_scan.cases if case.name == "odd")
    (args, more), (same, too) = (case.make(torch.device("cpu"), torch.float32) for _ in range(2))
    wanted = selective_scan.reference(*same, **too)
    op = dataclasses.replace(selective_scan)
    kernel = selective_scan.reference if right else lambda *args, **more: selective_scan.reference(*args, **more) + 1
    vars(op)["triton"] = lambda *args, **more: kernel(*args, **more)
    assert torch.equal(checked(op, *args, **more), wanted)
    assert kind_of(args) == kind_of(same)
    for ours, theirs in zip(*(torch.utils._pytree.tree_leaves(list(one)) for one in (args, same)), strict=True):
        assert not isinstance(ours, torch.Tensor) or torch.equal(ours, theirs)
    assert (op.outcomes.rows()[0].endswith("agree")) == right


def test_without_memory_for_a_check_the_kernel_runs():
    def short(x):
        raise torch.OutOfMemoryError

    op = dataclasses.replace(op_of(None), reference=short)
    vars(op)["triton"] = lambda x: 2 * x
    assert torch.equal(checked(op, torch.ones(2)), torch.full((2,), 2.0)) and op.outcomes.rows() == [UNCHECKED]


def test_measured_generations_are_not_checked(monkeypatch):
    noted = SimpleNamespace(run=lambda *_: "run", run_checked=lambda *_: "checked")
    op = dataclasses.replace(rms_norm)
    vars(op).update(outcomes=noted, triton=None)
    x = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr("accel_kernels.op.tensors", lambda _: iter([x]))
    for compute, wanted in (((9, 0), "run"), ((8, 6), "checked"), ((12, 0), "checked")):
        with replayed(dataclasses.replace(CARD, compute=compute)):
            assert op.guarded(op.reference, x) == wanted


def test_the_report_tells(monkeypatch):
    model = accel.optimize(make("llama"))
    monkeypatch.setitem(vars(rms_norm), "outcomes", SimpleNamespace(rows=lambda: ["was refused"]))
    report = accel.report(model)
    assert report.kernels == [("rms_norm", "was refused")] and "was refused" in str(report)
    assert report.to_dict()["kernels"] == [{"op": "rms_norm", "outcome": "was refused"}]
