"""Plans that are applied and undone, and parts of a pipeline that are replaced."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
from torch import nn

import accel
from accel.errors import PatchConflict
from accel.options import Options
from accel.patching.fast_forward import FastForward
from accel.patching.rule import Match, Rule
from accel.planning.plan import PLAN, Plan, create_context
from support.llm.families import make


class Noted:
    """A patch that notes what is done to it. broken: applying it raises."""

    def __init__(self, name: str, log: list[str], broken: bool = False):
        self.name, self.log, self.broken = name, log, broken

    def apply(self) -> None:
        if self.broken:
            raise MemoryError(self.name)
        self.log.append(f"+{self.name}")

    def check(self) -> None:
        if self.broken:
            raise PatchConflict(self.name)

    def undo(self) -> None:
        self.log.append(f"-{self.name}")


def planned(*patches: Noted) -> Plan:
    rule = Rule("noted", lambda site, context: None if site.path else Match(patches=patches))
    return Plan(nn.Linear(2, 2), [rule], create_context(Options()))


@pytest.fixture
def log():
    return []


def test_undone_last_in_first_out(log):
    plan = planned(*(Noted(name, log) for name in "abc"))
    plan.apply()
    plan.undo()
    assert log == ["+a", "+b", "+c", "-c", "-b", "-a"]


def test_an_error_undoes_what_was_applied_in_that_order_too(log):
    plan = planned(Noted("a", log), Noted("b", log), Noted("c", log, broken=True))
    with pytest.raises(MemoryError):
        plan.apply()
    assert log == ["+a", "+b", "-b", "-a"]


def test_stock_for_a_while_is_undone_and_applied_in_order(log):
    plan = planned(*(Noted(name, log) for name in "ab"))
    plan.apply()
    with plan.unfused():
        log.append("stock")
    assert log == ["+a", "+b", "-b", "-a", "stock", "+a", "+b"]


def test_a_conflict_is_found_before_anything_is_undone(log):
    patches = [Noted(name, log) for name in "ab"]
    plan = planned(*patches)
    plan.apply()
    patches[0].broken = True
    with pytest.raises(PatchConflict):
        plan.undo()
    assert log == ["+a", "+b"]


def patched(model):
    return any(isinstance(vars(module).get("forward"), FastForward) for module in model.modules())


def other(pipe):
    return copy.deepcopy(pipe.unet)


@pytest.fixture
def quietly():
    """A warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def test_the_one_that_was_there_is_restored(sdxl_pipe, tiny, quietly):
    pipe, new = sdxl_pipe, other(sdxl_pipe)
    old, attributes = pipe.unet, set(vars(pipe))
    before, untouched = tiny.snapshot(old), tiny.snapshot(new)
    accel.optimize(pipe)
    pipe.unet = new
    accel.restore(pipe)
    tiny.assert_same_state(before, tiny.snapshot(old))
    tiny.assert_same_state(untouched, tiny.snapshot(new))
    assert set(vars(pipe)) == attributes and PLAN not in vars(old)


@pytest.mark.turns(2)
def test_all_that_were_there_are(sdxl_pipe, quietly):
    pipe, held = sdxl_pipe, []
    for _ in range(3):
        accel.optimize(pipe)
        held.append(pipe.unet)
        pipe.unet = make_plain(pipe.unet)
    assert all(map(patched, held))
    accel.restore(pipe)
    assert not any(map(patched, held))


def make_plain(unet):
    return accel.restore(copy.deepcopy(unet))


@pytest.mark.turns(2)
def test_one_that_comes_back_is_restored_once(sdxl_pipe, quietly):
    pipe, old = sdxl_pipe, sdxl_pipe.unet
    accel.optimize(pipe)
    pipe.unet = make_plain(old)
    accel.optimize(pipe)
    new, pipe.unet = pipe.unet, old
    accel.restore(pipe)
    assert not patched(old) and not patched(new)


def test_one_that_was_optimized_again_by_itself_stays_so(sdxl_pipe):
    pipe, old = sdxl_pipe, sdxl_pipe.unet
    accel.optimize(pipe)
    accel.optimize(old)
    pipe.unet = make_plain(old)
    with pytest.warns(UserWarning, match="a UNet2DConditionModel that this .* stays optimized: it was optimized again"):
        accel.restore(pipe)
    assert patched(old) and not patched(pipe.vae)
    assert not patched(accel.restore(old))


@pytest.mark.parametrize("first", [True, False], ids=["the first", "the second"])
@pytest.mark.turns(2)
def test_one_that_another_optimized_pipeline_uses_stays_so(sdxl_pipe, first):
    pipes = [sdxl_pipe, type(sdxl_pipe)(**sdxl_pipe.components)]
    for pipe in pipes:
        accel.optimize(pipe)
    leaving, staying = pipes if first else pipes[::-1]
    old, leaving.unet = leaving.unet, make_plain(leaving.unet)
    with pytest.warns(UserWarning, match="stays optimized: an optimized StableDiffusionXLPipeline uses it"):
        accel.restore(leaving)
    assert patched(old) and accel.report(staying).sites
    accel.restore(staying)
    assert not patched(old)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))], ids=["copy", "pickle"]
)
@pytest.mark.turns(2)
def test_a_copy_knows_its_own(sdxl_pipe, copied, quietly):
    accel.optimize(sdxl_pipe)
    former, sdxl_pipe.unet = sdxl_pipe.unet, make_plain(sdxl_pipe.unet)
    accel.optimize(sdxl_pipe)
    pipe = copied(sdxl_pipe)
    old, pipe.unet = pipe.unet, make_plain(pipe.unet)
    accel.restore(pipe)
    assert not patched(old) and patched(former) and patched(sdxl_pipe.unet)
    accel.restore(sdxl_pipe)
    assert not patched(former) and not patched(sdxl_pipe.unet)


def test_nobody_holds_what_was_replaced(sdxl_pipe, quietly):
    accel.optimize(sdxl_pipe, graphs=False)  # graphs are held by the memory they share
    old = weakref.ref(sdxl_pipe.unet)
    sdxl_pipe.unet = make_plain(sdxl_pipe.unet)
    gc.collect()
    assert old() is None
    accel.restore(sdxl_pipe)


def test_a_pipeline_of_transformers_remembers_too(sdxl_pipe, quietly):
    from transformers import TextGenerationPipeline

    pipe = TextGenerationPipeline(model=make("llama"), tokenizer=sdxl_pipe.tokenizer)
    attributes, old = set(vars(pipe)), pipe.model
    accel.optimize(pipe)
    assert patched(old)
    pipe.model = make("llama")
    accel.restore(pipe)
    assert not patched(old) and set(vars(pipe)) == attributes
