"""Fast forwards: which calls they take, and the parts of a module that they rely on."""

import copy
import pickle

import pytest
import torch
from torch import nn

import accel
from accel.patching.arguments import Arguments
from accel.patching.fallback_log import FallbackLog
from accel.patching.fast_forward import FastForward
from accel.patching.guard import Guard, Parts


class Doubling(nn.Module):
    """Stock."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x, gate=None, *, shift=0.0):
        return x * self.weight + shift if gate is None else x * self.weight * gate


class Tripling(Doubling):
    def forward(self, x, gate=None, *, shift=0.0):
        return 3 * x


class OtherOrder(Doubling):
    def forward(self, x, shift=0.0, gate=None):
        return x + shift


class FastDoubling(FastForward):
    """Knows no gate, cannot do integers, and has a bug for shifts that are negative."""

    def unfit(self, x, shift=0.0):
        return None if x.is_floating_point() else "integers"

    def fast(self, x, shift=0.0):
        if shift < 0:
            raise KeyError("a bug")
        return x * 2 + shift


def patched(kind=Doubling):
    module = kind().eval()
    module.forward = FastDoubling(module, "it", None, FallbackLog())
    return module


def rows(module):
    return [(reason, calls) for _, reason, calls in vars(module)["forward"].log.rows()]


UNKNOWN = "arguments the fast forward does not know"


@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        ((2.0,), {}, None),
        ((2.0,), {"shift": 1.0}, None),
        ((), {"x": 2.0}, None),
        ((2.0, 3.0), {}, UNKNOWN),
        ((2.0,), {"gate": 3.0}, UNKNOWN),
        ((2.0,), {"gate": None}, UNKNOWN),
        ((2.0,), {"shift": -1.0}, "the fast forward raised KeyError: 'a bug'"),
    ],
)
def test_a_call_that_is_not_known_runs_stock(args, kwargs, reason):
    args, module = (*map(torch.tensor, args[:1]), *args[1:]), patched()
    kwargs = {name: torch.tensor(value) if name == "x" else value for name, value in kwargs.items()}
    with torch.no_grad():
        assert torch.equal(module(*args, **kwargs), Doubling()(*args, **kwargs))
    assert rows(module) == ([] if reason is None else [(reason, 1)])


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((torch.ones(2),), {"scale": 2}),
        ((torch.ones(2), None, 1.0), {}),
        ((torch.ones(2),), {"x": 1}),
        ((None,), {}),
        (("words",), {"shift": 1}),
        ((torch.ones(2),), {"gate": torch.ones(3)}),
    ],
)
def test_a_wrong_call_raises_what_stock_raises(args, kwargs):
    errors = []
    for module in (patched(), Doubling()):
        with torch.no_grad(), pytest.raises(Exception) as raised:
            module(*args, **kwargs)
        errors.append((raised.type, str(raised.value), raised.value.__context__))
    assert errors[0] == errors[1]


def test_arguments_by_position_mean_the_same_in_both():
    module = patched(OtherOrder)
    with torch.no_grad():
        assert module(torch.tensor(2.0), 1.0) == 5.0  # the first two have the same names in the same places
        assert module(torch.tensor(2.0), 1.0, None) == 3.0  # stock
    assert rows(module) == [(UNKNOWN, 1)]


def test_which_calls_two_functions_take_alike():
    def stock(self, x, a=None, b=None, *, c=1, **more): ...

    def partly(self, x, b=None, **more): ...

    def through(self, *args, **kwargs): ...

    both = Arguments(stock, partly)
    assert both.take((1,), {"b": 1, "a": 2, "c": 3, "unknown": 4})
    assert not both.take((1, 2), {}) and not both.take((), {"b": 1}) and not both.take((1,), {"x": 1})
    assert Arguments(stock, through).take((1, 2, 3), {"c": 1})
    assert not Arguments(stock, through).take((1, 2, 3, 4), {}) and not Arguments(stock, through).take((), {})


def test_an_error_of_memory_is_raised_and_not_tried_again():
    module, tried = patched(), []
    vars(module)["forward"].fast = lambda x, shift=0.0: tried.append(x) or (_ for _ in ()).throw(MemoryError("no more"))
    with torch.no_grad(), pytest.raises(MemoryError, match="no more"):
        module(torch.ones(2))
    assert len(tried) == 1 and rows(module) == []


@pytest.mark.parametrize("copied", ["itself", "deepcopy", "pickle"])
def test_another_class_or_another_forward_on_it_is_noticed(copied, monkeypatch):
    """A copy of what was changed is changed too; it does not take what it finds for what was matched."""
    copies = {"itself": lambda m: m, "deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}
    x = torch.ones(2)
    with torch.no_grad():
        module = patched()
        assert torch.equal(copies[copied](module)(x), 2 * x)
        module.__class__ = Tripling
        other = copies[copied](module)
        assert torch.equal(other(x), 3 * x)
        assert rows(other) == [("Tripling where Doubling is expected: the class was changed after accel.optimize", 1)]
        module.__class__ = Doubling
        assert torch.equal(module(x), 2 * x) and len(rows(module)) == (copied == "itself")
        with monkeypatch.context() as patch:
            patch.setattr(Doubling, "forward", lambda self, x: 5 * x)
            other = copies[copied](module)
            assert torch.equal(other(x), 5 * x)
            assert rows(other)[-1] == ("Doubling.forward was changed after accel.optimize", 1)
        assert torch.equal(module(x), 2 * x)


def test_an_error_deep_inside_is_tried_again_in_few_places(tiny):
    """Each forward around the one that failed would try stock; those that know it did not help do not."""
    model, seen = tiny.unet(), []
    accel.optimize(model)

    class Failing(nn.Module):
        def forward(self, *args, **kwargs):
            seen.append(1)
            raise KeyError("the user's")

    model.up_blocks[1].attentions[0].transformer_blocks[0].attn2 = Failing()
    with torch.no_grad(), pytest.raises(KeyError, match="the user's"):
        model(**tiny.inputs(model))
    assert len(seen) <= 3  # the stack's, the block's within it, and stock


class Scaled(nn.Module):
    """Reads settings of several kinds."""

    def __init__(self):
        super().__init__()
        self.scales, self.named, self.limit, self.note = [1.0, 2.0], {"low": 0.5}, torch.tensor([1.0, 2.0]), "mine"
        self.least, self.inner = torch.ones(()), nn.Tanh()
        self.eval()

    def forward(self, x):
        low = self.named["low"]
        return self.inner(x * self.scales[0] * low).clamp(self.least, self.limit)


def guarded(module):
    """The function that asks what changed, and the list itself."""

    def parts():
        return Parts((module, module.inner))

    guard = Guard(parts())
    return lambda: guard.changed(module, parts), guard


def put(module, name, value):
    setattr(module, name, value)


CHANGES = {
    "in a list": (lambda m: m.scales.append(3.0), lambda m: m.scales.pop(), "scales"),
    "in a dictionary": (lambda m: m.named.update(low=0.25), lambda m: m.named.update(low=0.5), "named"),
    "another list": (lambda m: put(m, "scales", [1.0]), lambda m: put(m, "scales", [1.0, 2.0]), "scales"),
    "another tensor": (lambda m: put(m, "limit", m.limit.clone()), None, "limit"),
    "an equal tensor of one number": (lambda m: put(m, "least", m.least.clone()), None, "least"),
    "a value in a list's place": (lambda m: put(m, "scales", 1.0), lambda m: put(m, "scales", [1.0, 2.0]), "scales"),
    "no list": (lambda m: delattr(m, "scales"), lambda m: put(m, "scales", [1.0, 2.0]), "scales"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_that_changes_is_named_and_its_taking_back_is_fast_again(name):
    change, back, setting = CHANGES[name]
    module = Scaled()
    changed, _ = guarded(module)
    assert changed() is None and changed() is None
    change(module)
    assert changed() == f"Scaled.{setting} was changed after accel.optimize"
    if back is not None:
        back(module)
        assert changed() is None


def test_none_and_what_the_code_does_not_read_do_not_count():
    module = Scaled()
    changed, _ = guarded(module)
    module.note, module.other = "yours", 3
    assert changed() is None
    del module.note
    module.low = module.inner.low = None  # a name that the code mentions
    assert changed() is None
    module.low = 3
    assert changed() == "Scaled.low was changed after accel.optimize"


def test_parts_of_another_class_with_hooks_or_in_training_are_told():
    module = Scaled()
    changed, _ = guarded(module)
    inner, module.inner = module.inner, nn.ReLU().eval()
    assert changed() == "ReLU where Tanh is expected: the class was changed after accel.optimize"
    module.inner = type("Tanh", (nn.ReLU,), {"__module__": "peft.layer"})().eval()
    assert changed() == "peft's Tanh where Tanh is expected: the class was changed after accel.optimize"
    module.inner = inner
    assert changed() is None
    handle = inner.register_forward_hook(lambda *_: None)
    assert changed() == "forward hooks"
    handle.remove()
    inner.train()
    assert changed() is None, "its code does not ask for it"
    module.inner = nn.Sequential(nn.Dropout()).eval()
    changed, _ = guarded(module)
    assert changed() is None
    module.inner.train()
    assert changed() == "training mode inside"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_notes_code_when_it_is_made(copied, monkeypatch):
    module = Scaled()
    _, guard = guarded(module)
    other, module = copied((guard, module))
    assert other.changed(module, lambda: Parts((module, module.inner))) is None
    with monkeypatch.context() as patch:
        patch.setattr(Scaled, "forward", lambda self, x: x)
        reason = "Scaled.forward was changed after accel.optimize"
        assert other.changed(module, lambda: Parts((module, module.inner))) == reason
        later, its = copied((guard, module))
    assert later.changed(its, lambda: Parts((its, its.inner))) == reason, "it cannot tell what had been there before"
