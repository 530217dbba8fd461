"""An op that a user replaces by name: checked, run at every site, named in the report, undone."""

import copy
import pickle

import pytest
import torch
from accel_kernels import rms_norm

import accel
from accel.patching.user_ops import registered, replaceable
from support.llm.families import make, prompt
from support.together import together


class Counted:
    """A reference that counts its calls. declines: those that it leaves to accel."""

    def __init__(self, name: str, declines=lambda x: False):
        self.reference, self.declines, self.calls = replaceable()[name].reference, declines, 0

    def __call__(self, x, *args, **kwargs):
        if self.declines(x):
            return NotImplemented
        self.calls += 1
        return self.reference(x, *args, **kwargs)


def counted(name: str, **declines) -> Counted:
    """Registered until the test ends."""
    function = Counted(name, **declines)
    function.handle = accel.register_op(name, function)
    function.calls = 0
    return function


@pytest.fixture(autouse=True)
def nothing_stays():
    assert not registered()
    yield
    for op in registered().values():
        op.function.handle.remove()
    assert not registered()


def told(model) -> list[tuple]:
    """What the report says of users' functions."""
    return [(rule, reason) for _, rule, _, reason in accel.report(model).sites if "register_op" in reason]


@pytest.mark.parametrize("name", sorted(replaceable()))
def test_every_op_may_be_replaced_by_its_reference(name):
    with accel.register_op(name, replaceable()[name].reference):
        assert set(registered()) == {name}
    assert not registered()


def without_eps(x, weight, eps, **more):
    return rms_norm.reference(x, weight, 0.3, **more)


def raising(x, weight, eps):
    return rms_norm.reference(x, weight, eps)


def alone(x, weight, eps, *, residual=None, **more):
    return rms_norm.reference(x, weight, eps, **more)


def wide(x, *args, **more):
    y = rms_norm.reference(x, *args, **more)
    return tuple(t.float() for t in y) if isinstance(y, tuple) else y.float()


def in_place(x, weight, eps, **more):
    y = rms_norm.reference(x, weight, eps, **more)
    x.mul_(2)
    return y


def silent(*args, **more):
    return NotImplemented


@pytest.mark.parametrize(
    "function, words",
    [
        (without_eps, "case 'tiny' in float16 on cpu: error .* more than twice torch's own"),
        (raising, "case 'tiny' .* it raised TypeError: .*offset"),
        (alone, "case 'tiny' .* it returned a tensor, the reference .a tensor, a tensor."),
        (wide, "case 'tiny' .* in torch.float32, not .* in torch.float16"),
        (in_place, "case 'tiny' .* error"),
        (silent, "NotImplemented for each of the cases"),
    ],
)
def test_a_wrong_function_is_refused_by_case_and_error(function, words):
    with pytest.raises(ValueError, match=words) as error:
        accel.register_op("rms_norm", function)
    assert f"{function.__name__} cannot replace rms_norm" in str(error.value)
    assert not registered()


def test_attention_that_does_not_store_its_keys_is_refused():
    reference = replaceable()["paged_attention"].reference

    def forgetful(q, k, v, kv, *args, **more):
        return reference(q, k, v, kv._replace(keys=kv.keys.clone()), *args, **more)

    with pytest.raises(ValueError, match="error"):
        accel.register_op("paged_attention", forgetful)


def test_other_names_are_refused_with_those_that_can_be_replaced():
    with pytest.raises(ValueError, match="'rmsnorm'.*fused_linear, gated, group_norm.*rms_norm"):
        accel.register_op("rmsnorm", rms_norm.reference)


@pytest.mark.parametrize("family, norms", [("llama", 2 * 2 + 1), ("gemma3", 2 * 6 + 1)])
def test_a_norm_runs_at_every_site_of_a_language_model(family, norms):
    """gemma3 has four norms a layer, of queries and keys besides, all 1 + w."""
    stock, function = make(family), counted("rms_norm")
    model = accel.optimize(copy.deepcopy(stock))
    assert told(model) == [("rms_norm", f"{__name__}.Counted, by accel.register_op")]
    function.calls = 0
    with torch.no_grad():
        found, wanted = (one(prompt(2), use_cache=True).logits for one in (model, stock))
    assert function.calls == norms
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    tokens, theirs = (one.generate(prompt(2), max_new_tokens=5, do_sample=False) for one in (model, stock))
    assert function.calls == norms * 6 and torch.equal(tokens, theirs)


def test_an_optimized_model_keeps_what_it_was_optimized_with(tiny):
    model = tiny.unet()
    inputs = tiny.inputs(model)
    accel.optimize(model)
    function = counted("group_norm")

    def calls() -> int:
        function.calls = 0
        with torch.no_grad():
            model(**inputs)
        return function.calls

    assert not calls() and not told(model)
    before = vars(model)["_accel_plan"].pool
    assert accel.optimize(model) and calls() and told(model)[0][0] == "group_norm"
    assert vars(model)["_accel_plan"].pool is not before  # whose graphs are of the other op
    function.handle.remove()
    assert calls() and told(model)
    assert accel.optimize(model) and not calls() and not told(model)


def test_what_a_function_leaves_to_accel_accel_does(tiny):
    stock = tiny.unet()
    inputs, function = tiny.inputs(stock), counted("layer_norm", declines=lambda x: x.shape[-1] == 32)
    model = accel.optimize(copy.deepcopy(stock))
    widths = {m.normalized_shape[0] for m in model.modules() if isinstance(m, torch.nn.LayerNorm)}
    assert 32 in widths and len(widths) > 1
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).sample, stock(**inputs).sample, rtol=1e-4, atol=1e-4)
    assert function.calls


def test_the_last_of_two_counts_in_its_thread_until_it_is_removed():
    first, seen = counted("rms_norm"), []
    with accel.register_op("rms_norm", rms_norm.reference) as second:
        assert registered()["rms_norm"].function is rms_norm.reference
        together(lambda: seen.append(registered()), [()])
        first.handle.remove()
        second.remove()
        assert not registered()
    with pytest.raises(KeyError), accel.register_op("rms_norm", rms_norm.reference):
        raise KeyError
    assert not registered() and seen == [{}]


def module_level(x, *args, **more):
    return rms_norm.reference(x, *args, **more) if x.dtype != torch.float64 else NotImplemented


def test_a_model_with_it_can_be_copied_and_pickled():
    with accel.register_op("rms_norm", module_level):
        model = accel.optimize(make("llama"))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert vars(copied.model.norm)["forward"].kernels.rms_norm.function is module_level
        assert torch.equal(copied(prompt()).logits, model(prompt()).logits)
