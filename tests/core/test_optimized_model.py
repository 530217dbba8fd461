"""What users do with an optimized model: copies, files, other dtypes, gradients, autocast, threads, torch.compile."""

import copy
import inspect
import io
import pickle

import pytest
import torch

import accel
from support.diffusion.outputs import close, run
from support.patched import fast_forwards
from support.together import together

# Of the largest value.
SHARE = {torch.bfloat16: 4e-2, torch.float16: 5e-3}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_uses_its_own_weights_and_restores_by_itself(pair, copied):
    model, twin, inputs = pair
    accel.optimize(model)
    other = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    close(run(other, inputs), run(twin, inputs))
    assert accel.report(other).sites == accel.report(model).sites
    assert len(fast_forwards(other)) == len(fast_forwards(model))
    accel.restore(other)
    assert not fast_forwards(other) and fast_forwards(model)
    assert torch.equal(run(other, inputs), run(twin, inputs))


def test_state_dict_and_save_pretrained_are_the_stock_ones(pair, tmp_path):
    model, twin, inputs = pair
    accel.optimize(model)
    ours, stock = model.state_dict(), twin.state_dict()
    assert list(ours) == list(stock)
    assert all(torch.equal(ours[name], stock[name]) for name in stock)
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    assert buffer.tell() < 1.2 * sum(t.nbytes for t in stock.values()) + 400 * len(stock)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(run(loaded, inputs), run(twin, inputs))


def test_loading_weights_afterwards_is_seen(pair, tiny):
    model, twin, inputs = pair
    accel.optimize(model)
    run(model, inputs)
    new = {name: tensor * 1.1 for name, tensor in twin.state_dict().items()}
    model.load_state_dict(new)
    twin.load_state_dict(new)
    close(run(model, inputs), run(twin, inputs))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_another_dtype(pair, when, dtype):
    model, twin, inputs = pair
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    if when == "before":
        accel.optimize(model.to(dtype))
    else:
        accel.optimize(model)
        model.to(dtype)
    twin.to(dtype)
    close(run(model, inputs), run(twin, inputs), SHARE[dtype])
    assert accel.report(model).fallbacks == []
    accel.restore(model)
    assert torch.equal(run(model, inputs), run(twin, inputs))


def test_gradients_and_training_run_stock_and_are_counted(pair):
    model, twin, inputs = pair
    accel.optimize(model)
    for m in (model, twin):
        m(**inputs).sample.square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=name)
    assert any("gradients are on" in reason for _, reason, _ in accel.report(model).fallbacks)
    model.train()
    with torch.no_grad():
        model(**inputs)
    assert any(reason == "training mode" for _, reason, _ in accel.report(model).fallbacks)


def test_autocast_runs_stock(pair):
    model, twin, inputs = pair
    accel.optimize(model)
    with torch.autocast("cpu", torch.bfloat16):
        close(run(model, inputs), run(twin, inputs), SHARE[torch.bfloat16])
    assert any(reason == "autocast is on" for _, reason, _ in accel.report(model).fallbacks)


def test_inference_mode_leaves_ordinary_weights(pair):
    model, twin, inputs = pair
    accel.optimize(model)
    model.to(torch.float64).to(torch.float32)  # the stacked projections are stacked anew in the next call
    with torch.inference_mode():
        got = model(**inputs).sample
    close(got.clone(), run(twin, inputs))
    assert not any(parameter.is_inference() for parameter in model.parameters())
    accel.restore(model)
    model(**inputs).sample.mean().backward()


def test_threads_agree(pair, tiny):
    model, twin, _ = pair
    accel.optimize(model)
    inputs = [tiny.inputs(model, height=8, width=4 + 2 * i, seed=i) for i in range(4)]
    wanted = [run(twin, i) for i in inputs]

    def work(index):
        for _ in range(5):
            close(run(model, inputs[index]), wanted[index])

    together(work, ((i,) for i in range(4)))


def test_projections_share_one_storage_without_a_second_copy(pair):
    model, _, _ = pair
    attention = next(m for n, m in model.named_modules() if n.endswith("attn1"))
    total = sum(p.untyped_storage().nbytes() for p in {p.data_ptr(): p for p in model.parameters()}.values())
    accel.optimize(model)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == total
    assert attention.to_k.weight.data_ptr() == attention.to_q.weight.data_ptr() + attention.to_q.weight.nbytes


def test_torch_compile_on_top_sees_the_stock_model(pair):
    model, twin, inputs = pair
    accel.optimize(model)
    compiled = torch.compile(model, backend="eager")
    close(run(compiled, inputs), run(twin, inputs))
    assert accel.report(model).fallbacks == []
    torch.compiler.reset()


def test_signatures_stay_those_of_the_stock_forwards(pair):
    model, twin, _ = pair
    accel.optimize(model)
    for ours, theirs in zip(model.modules(), twin.modules(), strict=True):
        assert str(inspect.signature(ours.forward)) == str(inspect.signature(theirs.forward))
