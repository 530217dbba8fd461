"""Kernels of linear attention in Triton's interpreter: results, states and windows, and slots that nobody may touch."""

import copy

import pytest
import torch

pytest.importorskip("triton")

from accel_kernels import causal_convolution, linear_attention_prompt, linear_attention_step, selective_scan
from accel_kernels.accuracy import in_float64
from torch.utils._pytree import tree_map

from support.everything import EVERYTHING
from support.kernels.recurrent import assert_states_as_good_as_torch

CPU = torch.device("cpu")
OPS = (causal_convolution, linear_attention_step, linear_attention_prompt, selective_scan)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALL = [(op, case) for op in OPS for case in op.cases if case.small]
ROWS = [
    pytest.param(op, case, dtype, id=f"{op.name}-{case.name}-{dtype}")
    for number, (op, case) in enumerate(SMALL)
    for dtype in (DTYPES if EVERYTHING else (DTYPES[number % 3],))
]
compiled = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")


@compiled
@pytest.mark.share(3)
@pytest.mark.parametrize("op, case, dtype", ROWS)
@pytest.mark.turns(2)
def test_results_and_states(op, case, dtype, poisoned):
    assert_states_as_good_as_torch(op, case, CPU, dtype)


def named(op, name):
    return next(case for case in op.cases if case.name == name).make(CPU, torch.float32)


def poison(tensor, keep):
    """The pool with NaN in every row but these."""
    others = torch.ones(tensor.shape[0], dtype=torch.bool)
    others[keep] = False
    tensor[others] = float("nan")
    return tensor


@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=compiled)], ids=["reference", "kernel"])
@pytest.mark.parametrize("op, name", [(linear_attention_step, "odd"), (linear_attention_prompt, "packed")])
def test_other_slots_are_neither_read_nor_written(op, name, kernel):
    """At position 0 nor is a sequence's own."""
    args, more = named(op, name)
    pool, sequences = args[5], args[6]
    begun = sequences.slots[(sequences.slots >= 0) & (sequences.positions > 0)]
    poison(pool, begun)
    if "convolution" in more:
        poison(more["convolution"].window, begun)
    found = (op.triton if kernel else op.reference)(*args, **more)
    assert torch.isfinite(found).all()
    live = sequences.slots[sequences.slots >= 0]
    if sequences.spans is not None:
        live = live[sequences.spans[:, 1] > sequences.spans[:, 0]]
    written = torch.isfinite(pool.flatten(1)).all(1)
    assert written.tolist() == [row in {*live.tolist(), *begun.tolist()} for row in range(len(pool))]


@pytest.mark.parametrize("name", ["qwen", "kimi", "space"])
def test_a_prompt_is_its_tokens_one_by_one(name):
    """Whatever is cut where: in one call, in two, and in steps."""
    args, more = named(linear_attention_prompt, name)
    q, k, v, a, decay, state, sequences = args
    whole, left = state.clone(), state.clone()
    found = linear_attention_prompt(q, k, v, a, decay, whole, sequences, **more)
    cut, outputs = 33, []
    for part in (slice(0, cut), *(slice(t, t + 1) for t in range(cut, q.shape[1]))):
        b = None if more.get("b") is None else more["b"][:, part]
        given, at = (t[:, part] for t in (q, k, v, a)), sequences._replace(positions=sequences.positions + part.start)
        if part.start:
            some = [None if t is None else t[:, 0] for t in (*given, b)]
            y = linear_attention_step(*some[:4], decay, left, at, **more | {"b": some[4]} if "b" in more else more)
            outputs.append(y.view(y.shape[0], 1, *found.shape[2:]))
        else:
            outputs.append(linear_attention_prompt(*given, decay, left, at, **more | {"b": b} if "b" in more else more))
    torch.testing.assert_close(torch.cat(outputs, 1), found, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(left, whole, rtol=2e-4, atol=2e-5)


@pytest.mark.share(1)  # each adds by itself
@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=compiled)], ids=["reference", "kernel"])
def test_sums_of_many_decays_keep_what_is_between_them(kernel):
    """Of 64 tokens, of which each halves the state several times, float32 holds a sum to 1e-5, and its decay as far."""
    made = [named(linear_attention_prompt, "space") for _ in range(2)]
    for args, _ in made:
        args[4].bias.fill_(4.0)
    (args, more), (exact, wide) = made[0], tree_map(in_float64, made[1])
    op = linear_attention_prompt.triton if kernel else linear_attention_prompt.reference
    found, wanted = op(*args, **more), linear_attention_prompt.reference(*exact, **wide)
    for ours, truth in ((found, wanted), (args[5], exact[5])):
        assert float((ours.double() - truth).abs().max() / truth.abs().max()) < 5e-7


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_on_a_cpu_an_op_is_its_reference(op):
    args, more = next(case for case in op.cases if case.small).make(CPU, torch.float32)
    again = copy.deepcopy((args, more))
    torch.testing.assert_close(op(*args, **more), op.reference(*again[0], **again[1]), rtol=0, atol=0)


REFUSED = {
    "spans": lambda args, more: ((*args[:6], args[6]._replace(spans=torch.zeros(2, 2))), more),
    "states in": lambda args, more: ((*args[:5], args[5].double(), args[6]), more),
    "next to each other": lambda args, more: ((args[0].transpose(1, 2), *args[1:]), more),
    "window": lambda args, more: (
        args, more | {"convolution": more["convolution"]._replace(window=more["convolution"].window.double())},
    ),
    "gate": lambda args, more: (args, more | {"norm": more["norm"]._replace(activation="relu")}),
    "empty": lambda args, more: ((args[0][:0], *args[1:]), more),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_what_a_step_cannot_take_is_named(reason):
    args, more = REFUSED[reason](*named(linear_attention_step, "qwen"))
    assert reason in linear_attention_step.supports(*args, **more)
