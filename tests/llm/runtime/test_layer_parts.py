"""Every module inside a fused layer of every family, changed in every way: what stock then computes is what comes."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import accel
from support.llm.families import FAMILIES, Family, available, layers, make, padded
from support.llm.outputs import same

IDS, MASK = padded((4, 3))


def called(model) -> dict[str, torch.Tensor]:
    return {"logits": model(input_ids=IDS, attention_mask=MASK, use_cache=True).logits[:, -1]}


def more(output):
    """Half as much again of each tensor of numbers."""
    if isinstance(output, tuple):
        return tuple(map(more, output))
    return 1.5 * output if isinstance(output, torch.Tensor) and output.is_floating_point() else output


@contextmanager
def other(target: object, name: str, value: object) -> Iterator[None]:
    before = getattr(target, name)
    own = name in vars(target)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before) if own or name != "forward" else delattr(target, name)


def as_class(module):
    kind = type(module)
    forward = lambda self, *args, **kwargs: more(kind.forward(self, *args, **kwargs))  # noqa: E731
    yield other(module, "__class__", type("Sub", (kind,), {"forward": forward}))


def as_forward(module):
    inner = module.forward
    yield other(module, "forward", lambda *args, **kwargs: more(inner(*args, **kwargs)))


@contextmanager
def hooked(module):
    with module.register_forward_hook(lambda module, args, output: more(output)):
        yield


def settings(module):
    """Each number and switch that it holds."""
    for name, value in list(vars(module).items()):
        if isinstance(value, int | float) and name != "training" and not name.startswith("_"):
            yield other(module, name, not value if isinstance(value, bool) else 2 * value or type(value)(1))


# In training, dropouts drop all.
CHANGES: dict[str, Callable] = {
    "class": as_class,
    "forward": as_forward,
    "hook": lambda module: [hooked(module)],
    "training": lambda module: [other(module, "training", True)],
    "setting": settings,
}
TABLE = [(family, change) for family in FAMILIES if family.expected != "stock" for change in CHANGES]


def dropping(family: Family):
    model = make(family)
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) is float and "drop" in name:
                setattr(module, name, 1.0)
        if isinstance(module, torch.nn.Dropout):
            module.p = 1.0
    return model


@pytest.mark.parametrize(("family", "change"), TABLE, ids=str)
@pytest.mark.share(40)
def test_a_changed_module_inside_a_layer_is_noticed(family, change):
    if not available(family.kind):
        pytest.skip(f"this transformers has no {family.kind}")
    stock = dropping(family)
    ours = accel.optimize(copy.deepcopy(stock))

    def fallbacks() -> int:
        return sum(calls for path, _, calls in accel.report(ours).fallbacks if not path)

    plain = called(stock)
    same(called(ours), plain)
    sites = accel.report(ours).sites
    fast = [path for path, rule, status, _ in sites if (rule, status) == ("decoder layer", "patched")]
    if not fast:
        assert family.expected == "either"
        return
    told = fallbacks()
    assert not told or family.expected == "either"
    path = next(path for path in layers(ours) if path in fast)
    for name, module in ours.get_submodule(path).named_modules():
        twin = stock.get_submodule(f"{path}.{name}".rstrip("."))
        for mine, its in zip(CHANGES[change](module), CHANGES[change](twin), strict=True):
            with its:
                try:
                    wanted = called(stock)
                except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
                    continue
                with mine:
                    same(called(ours), wanted)
    told = fallbacks()
    same(called(ours), plain)
    assert fallbacks() == told, "it is fast again"
