"""A scheduler stays what it was: its updates, files, copies and signatures; what is not known stays stock."""

import copy
import inspect

import pytest

import accel
from accel.diffusion.schedulers import LINEAR, RULES, LinearUpdate, SchedulerStep
from accel.options import Options
from accel.planning.plan import PLAN, Plan, create_context
from support.diffusion.scheduler_cases import NAMES
from support.diffusion.scheduler_loops import denoise, equal, foreign_schedulers, make, optimized, pickled


def test_a_scheduler_inside_another():
    inner = make("DPMSolverMultistep")
    scheduler = make("UniPCMultistep", solver_p=inner, disable_corrector=[0, 1, 2, 3, 4])
    wanted, _ = denoise(copy.deepcopy(scheduler))
    ours, plan = optimized(scheduler)
    got, accesses = denoise(ours, "meta")
    assert accesses == []
    assert equal(got, wanted)
    plan.undo()
    assert not {"step", "set_timesteps"} & {*vars(ours), *vars(ours.solver_p)}


def test_another_update_than_the_known_one_stays_stock(monkeypatch):
    from diffusers import UniPCMultistepScheduler

    name = "multistep_uni_p_bh_update"
    stock = getattr(UniPCMultistepScheduler, name)
    monkeypatch.setattr(UniPCMultistepScheduler, name, lambda self, *args, **kwargs: stock(self, *args, **kwargs) ** 2)
    ours, plan = optimized(make("UniPCMultistep"))
    assert name not in vars(ours)
    assert isinstance(vars(ours)["multistep_uni_c_bh_update"], LinearUpdate)
    assert f"{name} left stock" in plan.rows[0].reason


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.share(3)
def test_it_is_still_that_scheduler(name, tmp_path):
    scheduler = make(name)
    scheduler.set_timesteps(6)
    before, config = dict(vars(scheduler)), scheduler.to_json_string()
    plan = Plan(scheduler, RULES, create_context(Options()))
    plan.apply()
    assert [(row.rule, row.status, row.reason) for row in plan.rows] == [("scheduler", "patched", "")]
    for method in ("set_timesteps", "step", "scale_model_input", *LINEAR):
        if hasattr(type(scheduler), method):
            assert inspect.signature(getattr(scheduler, method)) == inspect.signature(getattr(make(name), method))
    assert not any(
        isinstance(value, SchedulerStep) for value in vars(type(scheduler).from_config(scheduler.config)).values()
    )
    scheduler.save_pretrained(tmp_path)
    assert type(scheduler).from_pretrained(tmp_path).to_json_string() == config
    for twin in (copy.deepcopy(scheduler), pickled(scheduler)):
        assert vars(twin)["step"].scheduler is twin and vars(twin)["step"].schedule.scheduler is twin
        twin.set_timesteps(4)
        assert scheduler.num_inference_steps == 6 and twin.num_inference_steps == 4
    plan.undo()
    assert vars(scheduler) == before and all(vars(scheduler)[key] is before[key] for key in before)


def test_what_is_not_known_stays_stock(pipe):
    for scheduler, reason in foreign_schedulers():
        pipe.scheduler = scheduler
        before = dict(vars(scheduler))
        (site,) = [site for site in accel.report(accel.optimize(pipe)).sites if site[0] == "scheduler"]
        assert site[1:3] == ("scheduler", "skipped") and reason in site[3]
        assert {key for key in vars(scheduler) if key != PLAN} == set(before)
        accel.restore(pipe)
        assert vars(scheduler) == before
        with pytest.raises(ValueError, match="strict=True: "):
            accel.optimize(pipe, strict=True)
