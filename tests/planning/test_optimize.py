"""optimize and restore on one model: what changes, what does not, and that all of it can be undone."""

import contextlib
import copy
import dataclasses
import inspect
import io
import pickle
import re
import threading
from typing import get_type_hints

import pytest
import torch

import accel
from accel.patching.fast_forward import FastForward
from accel.patching.patch import ForwardPatch


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs).sample


def close(got, wanted, dtype=torch.float32):
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))


def fast_forwards(model):
    return [m for m in model.modules() if isinstance(vars(m).get("forward"), FastForward)]


@pytest.fixture
def pair(tiny):
    """A model, its untouched twin, and inputs."""
    model = tiny.unet()
    return model, copy.deepcopy(model), tiny.inputs(model)


def test_restore_leaves_no_trace(pair, tiny):
    model, _, inputs = pair
    before, wanted = tiny.snapshot(model), run(model, inputs)
    assert accel.optimize(model) is model
    assert len(fast_forwards(model)) > 10
    run(model, inputs)
    assert accel.restore(model) is model
    tiny.assert_same_state(before, tiny.snapshot(model))
    assert torch.equal(run(model, inputs), wanted)


def test_restoring_twice_or_a_stock_model_does_nothing(pair, tiny):
    model, _, _ = pair
    before = tiny.snapshot(model)
    accel.restore(model)
    accel.restore(accel.restore(accel.optimize(model)))
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_a_second_optimize_plans_anew(pair, tiny):
    model, twin, inputs = pair
    before = tiny.snapshot(model)
    accel.optimize(model)
    accel.optimize(model, layout="keep")
    report = accel.report(model)
    assert ("", "channels-last weights", "skipped", 'layout="keep"') in report.sites
    assert model.conv_in.weight.is_contiguous()
    close(run(model, inputs), run(twin, inputs))
    accel.restore(model)
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_optimized_restores_after_the_block_and_after_an_error(pair, tiny):
    model, _, _ = pair
    before = tiny.snapshot(model)
    with accel.optimized(model, graphs=False) as same:
        assert same is model and fast_forwards(model)
    tiny.assert_same_state(before, tiny.snapshot(model))
    with pytest.raises(KeyError), accel.optimized(model):
        raise KeyError
    tiny.assert_same_state(before, tiny.snapshot(model))


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"atention": "auto"}, TypeError, "unknown option 'atention'; valid options: attention, layout, graphs"),
        ({"attention": "fastest"}, ValueError, "attention='fastest' is not one of 'auto', 'cudnn'"),
        ({"layout": "nchw"}, ValueError, "layout='nchw'"),
        ({"graphs": 1}, ValueError, "graphs=1"),
        ({"graph_memory_gb": "4"}, TypeError, "graph_memory_gb='4'"),
        ({"graph_memory_gb": -1}, ValueError, "graph_memory_gb=-1"),
        ({"strict": "yes"}, ValueError, "strict='yes'"),
    ],
)
def test_wrong_options_say_what_is_valid_and_touch_nothing(pair, tiny, options, error, message):
    model, _, _ = pair
    accel.optimize(model)
    before = tiny.snapshot(model)
    with pytest.raises(error) as caught:
        accel.optimize(model, **options)
    assert message in str(caught.value)
    tiny.assert_same_state(before, tiny.snapshot(model))


@pytest.mark.parametrize("function", [accel.optimize, accel.optimized])
def test_the_keywords_are_the_fields_of_options(function):
    signature = inspect.signature(function)
    named = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    fields = dataclasses.fields(accel.Options)
    assert [(p.name, p.default) for p in named] == [(field.name, field.default) for field in fields]
    hints, types = get_type_hints(function), get_type_hints(accel.Options)
    assert {p.name: hints[p.name] for p in named} == {field.name: types[field.name] for field in fields}
    assert signature.parameters["options"].default is None


# Of every field a value that is valid by itself and not its default.
OTHER = {
    "attention": "sdpa", "layout": "keep", "graphs": False, "graph_memory_gb": 1.5, "step_cache": 3, "weights": "int8",
    "activations": "int8", "keep_original": False, "kv_cache": "int8", "cpu": "fuse", "strict": True,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize("function", [accel.optimize, accel.optimized])
def test_every_keyword_arrives(function, name, monkeypatch):
    """The options that are chosen, seen where they are handed on to."""
    seen = []

    class Seen(Exception):
        pass

    def parts(obj):
        raise Seen

    choose = accel.options.choose
    monkeypatch.setattr(accel.api, "choose", lambda *given: seen.append(choose(*given)) or seen[-1])
    monkeypatch.setattr(accel.api, "_parts", parts)
    with pytest.raises(Seen), contextlib.ExitStack() as stack:
        stack.enter_context(function(object(), **{name: OTHER[name]}))
    assert OTHER.keys() == {field.name for field in dataclasses.fields(accel.Options)}
    assert seen[-1] == accel.Options(**{name: OTHER[name]}) != accel.Options()


def test_options_are_taken_as_an_object(pair):
    model, _, _ = pair
    options = accel.Options(layout="keep", graphs=False)
    assert accel.optimize(model, options) is model
    assert ("", "channels-last weights", "skipped", 'layout="keep"') in accel.report(model).sites
    with accel.optimized(model, options=options) as same:
        assert ("", "channels-last weights", "skipped", 'layout="keep"') in accel.report(same).sites


@pytest.mark.parametrize(
    "arguments, keywords, message",
    [
        (
            (accel.Options(graphs=False),),
            {"layout": "keep", "strict": True},
            "layout='keep', strict=True beside options",
        ),
        ((accel.Options(),), {"atention": "auto"}, "unknown option 'atention'; valid options: attention, layout"),
        (({"layout": "keep"},), {}, "options={'layout': 'keep'}: give an accel.Options, or its fields as keywords"),
        (("keep",), {}, "options='keep': give an accel.Options"),
    ],
)
def test_options_that_are_no_choice_touch_nothing(pair, tiny, arguments, keywords, message):
    model, _, _ = pair
    before = tiny.snapshot(model)
    for function in (accel.optimize, lambda *a, **k: accel.optimized(*a, **k).__enter__()):
        with pytest.raises(TypeError, match=re.escape(message)):
            function(model, *arguments, **keywords)
        tiny.assert_same_state(before, tiny.snapshot(model))


@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), "a string", None, [1]])
def test_other_objects_are_refused_by_every_function(thing):
    for function in (accel.optimize, accel.restore, accel.report, accel.verify):
        with pytest.raises(TypeError, match="give a diffusers pipeline, a diffusers model"):
            function(thing)


def test_an_error_while_applying_leaves_the_object_as_it_was(pair, tiny, monkeypatch):
    model, _, _ = pair
    stock = tiny.snapshot(model)
    accel.optimize(model)
    before = tiny.snapshot(model)

    apply, calls = ForwardPatch.apply, []

    def fails_once(self):
        calls.append(self)
        if len(calls) == 9:
            raise MemoryError("no room")
        apply(self)

    monkeypatch.setattr(ForwardPatch, "apply", fails_once)
    with pytest.raises(MemoryError, match="no room"):
        accel.optimize(model, graphs=False)
    assert len(calls) > 20  # the plan there was before is back in place
    tiny.assert_same_state(before, tiny.snapshot(model))
    accel.restore(model)
    tiny.assert_same_state(stock, tiny.snapshot(model))


def test_strict_raises_for_a_skipped_site_and_changes_nothing(tiny):
    model = tiny.unet("scale-shift")
    before = tiny.snapshot(model)
    with pytest.raises(accel.errors.SkippedSite, match="strict=True: .*resnet.*scales as well as shifts"):
        accel.optimize(model, strict=True)
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_restore_refuses_when_someone_patched_on_top_and_names_them(pair):
    model, _, inputs = pair
    accel.optimize(model)
    module = fast_forwards(model)[3]
    ours = module.forward
    module.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    plan = vars(model)["_accel_plan"]
    with pytest.raises(accel.errors.PatchConflict, match="was replaced after accel.optimize by <function"):
        accel.restore(model)
    assert vars(model)["_accel_plan"] is plan and len(fast_forwards(model)) > 10
    module.forward = ours
    accel.restore(model)
    assert not fast_forwards(model)


def test_deepcopy_uses_its_own_weights_and_restores_by_itself(pair):
    model, twin, inputs = pair
    accel.optimize(model)
    twin_of_optimized = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    close(run(twin_of_optimized, inputs), run(twin, inputs))
    assert accel.report(twin_of_optimized).sites == accel.report(model).sites
    accel.restore(twin_of_optimized)
    assert not fast_forwards(twin_of_optimized) and fast_forwards(model)
    assert torch.equal(run(twin_of_optimized, inputs), run(twin, inputs))


def test_pickle_round_trip(pair):
    model, twin, inputs = pair
    accel.optimize(model)
    loaded = pickle.loads(pickle.dumps(model))
    assert len(fast_forwards(loaded)) == len(fast_forwards(model))
    close(run(loaded, inputs), run(twin, inputs))
    assert torch.equal(run(accel.restore(loaded), inputs), run(twin, inputs))


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
    close(run(model, inputs), run(twin, inputs), dtype)
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
        close(run(model, inputs), run(twin, inputs), torch.bfloat16)
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
    errors = []

    def work(index):
        try:
            for _ in range(5):
                close(run(model, inputs[index]), wanted[index])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_projections_share_one_storage_without_a_second_copy(pair):
    model, _, _ = pair
    attention = next(m for n, m in model.named_modules() if n.endswith("attn1"))
    total = sum(p.untyped_storage().nbytes() for p in {p.data_ptr(): p for p in model.parameters()}.values())
    accel.optimize(model)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == total
    assert attention.to_k.weight.data_ptr() == attention.to_q.weight.data_ptr() + attention.to_q.weight.nbytes


def test_verify_compares_with_stock_and_leaves_it_optimized(pair, monkeypatch):
    model, _, _ = pair
    with pytest.raises(ValueError, match="not optimized"):
        accel.verify(model)
    accel.optimize(model)
    sites = len(fast_forwards(model))
    block = type(fast_forwards(model)[5].forward)
    fast = block.fast
    monkeypatch.setattr(
        block, "fast", lambda self, *a, **k: (1 + 1e-6) * fast(self, *a, **k)
    )  # else a CPU may be exact
    quality = accel.verify(model)
    assert 0 < quality.max_error < 1e-4 and quality.finite and quality.psnr_db > 80
    assert "PSNR" in str(quality)
    assert len(fast_forwards(model)) == sites


def test_verify_sees_a_wrong_answer(pair, monkeypatch):
    model, _, _ = pair
    accel.optimize(model)
    wrong = fast_forwards(model)[5]
    fast = type(wrong.forward).fast
    monkeypatch.setattr(type(wrong.forward), "fast", lambda self, *a, **k: 1.5 * fast(self, *a, **k))
    assert accel.verify(model).relative_error > 1e-3


def test_report_tells_every_site_and_prints(pair):
    model, _, inputs = pair
    assert accel.report(model).sites == []
    accel.optimize(model)
    report = accel.report(model)
    assert {status for _, _, status, _ in report.sites} == {"patched"}
    assert any(path.endswith("resnets.0") and rule == "resnet block" for path, rule, _, _ in report.sites)
    data = report.to_dict()
    assert data["sites"][0].keys() == {"path", "rule", "status", "reason"}
    text = str(report)
    assert "resnet block" in text and "waits for CUDA" in text and report.summary() in text.replace("\n", " ")


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
