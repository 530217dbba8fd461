"""Schedulers that are patched: undone, copied, and asked for timesteps of any kind."""

import copy
import inspect

import pytest
import torch

import accel
from accel.diffusion.schedulers import HOST_NOISE, LINEAR, RULES, UNKNOWN, LinearUpdate, SchedulerStep
from accel.options import Options
from accel.planning.plan import PLAN, Plan, create_context, plan_of
from support.diffusion.emulated_device import EmulatedDevice, Far
from support.diffusion.scheduler_cases import NAMES
from support.diffusion.scheduler_loops import denoise, equal, foreign_schedulers, make, optimized, pickled
from support.diffusion.tiny_models import make_sdxl_pipeline


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
@pytest.mark.share(10)
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


@pytest.mark.turns(2)
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


def with_its_dict(scheduler):
    twin = type(scheduler).__new__(type(scheduler))
    vars(twin).update(vars(scheduler))
    return twin


def in_turns(scheduler, copied):
    """Two samples, each stepped by a copy of its own, then one by the original."""
    scheduler.set_timesteps(4)
    schedulers = [copied(scheduler), copied(scheduler)]
    generator = torch.Generator().manual_seed(1)
    samples = list(torch.randn(2, 1, 4, 4, 4, generator=generator))
    outputs = []
    torch.manual_seed(2)
    for t in scheduler.timesteps:
        for i in range(len(samples)):
            x = samples[i]
            if hasattr(scheduler, "scale_model_input"):
                x = schedulers[i].scale_model_input(x, t)
            samples[i] = schedulers[i].step(0.8 * x, t, samples[i], return_dict=False)[0]
            outputs.append(samples[i])
    sample = outputs[0]
    for t in scheduler.timesteps:
        sample = scheduler.step(0.5 * sample, t, sample, return_dict=False)[0]
        outputs.append(sample)
    return outputs


@pytest.mark.parametrize("copied", [copy.copy, with_its_dict])
@pytest.mark.parametrize("name", NAMES)
def test_copies_stepped_in_turns(name, copied):
    scheduler = make(name)
    ours, plan = optimized(scheduler)
    assert equal(in_turns(ours, copied), in_turns(copy.deepcopy(scheduler), copied))
    assert plan.log.rows() == [] and "step" in vars(ours)


def as_panoramas_do(scheduler):
    """Their one scheduler is given the state of each view before its step, and that is kept after it."""
    scheduler.set_timesteps(4)
    states = [copy.deepcopy(vars(scheduler))] * 2
    samples = list(torch.randn(2, 1, 4, 4, 4, generator=torch.Generator().manual_seed(1)))
    outputs = []
    torch.manual_seed(2)
    for t in scheduler.timesteps:
        for i, state in enumerate(states):
            vars(scheduler).update(state)
            samples[i] = scheduler.step(0.8 * samples[i], t, samples[i], return_dict=False)[0]
            outputs.append(samples[i])
            states[i] = copy.deepcopy(vars(scheduler))
    return outputs


@pytest.mark.parametrize("name", ["DDIM", "UniPCMultistep", "EulerDiscrete"])
def test_a_state_that_is_kept_and_put_back(name):
    scheduler = make(name)
    ours, _ = optimized(scheduler)
    assert equal(as_panoramas_do(ours), as_panoramas_do(scheduler))
    assert plan_of(ours) is None and "step" not in vars(ours)


@pytest.mark.parametrize("copied", [copy.copy, with_its_dict])
@pytest.mark.turns(2)
def test_a_pipeline_that_holds_a_copy(copied):
    """It is optimized at the next call as any other scheduler is, and restored with the pipeline, as is the first."""
    pipe = make_sdxl_pipeline()

    def draw(pipe):
        generator = torch.Generator().manual_seed(0)
        return pipe("a", num_inference_steps=3, height=16, width=16, output_type="np", generator=generator).images

    stock = copy.deepcopy(pipe)
    wanted = draw(stock)
    accel.optimize(pipe)
    first = pipe.scheduler
    draw(pipe)
    pipe.scheduler = copied(first)
    assert abs(draw(pipe) - wanted).max() < 1e-2
    assert plan_of(pipe.scheduler) is not None and vars(pipe.scheduler)["step"].owner is pipe.scheduler
    other = copy.copy(pipe)
    other.scheduler = copied(first)
    accel.restore(pipe)
    for scheduler in (first, pipe.scheduler):
        assert plan_of(scheduler) is None and "step" not in vars(scheduler)
    assert (draw(pipe) == wanted).all() and (draw(other) == wanted).all()


class OnDevice:
    """A scheduler with its timesteps on the emulated device, and a loop over whatever tensors one likes."""

    def __init__(self, name: str, steps: int = 6, **config):
        self.stock = make(name, **config)
        self.ours, self.plan = optimized(self.stock)
        self.sample = torch.randn(1, 4, 8, 8)
        self.steps = steps
        self.stock.set_timesteps(steps)

    def loop(self, timesteps=None, **step):
        """All samples, and accesses; timesteps: a function of the scheduler."""
        with EmulatedDevice() as device:
            self.ours.set_timesteps(self.steps, device="meta")
            sample, outputs = EmulatedDevice.put(self.sample), []
            times = self.ours.timesteps if timesteps is None else timesteps(self.ours)
            device.accesses.clear()
            for t in times:
                given = self.ours.scale_model_input(sample, t)
                sample = self.ours.step(0.5 * given, t, sample, **step).prev_sample
                outputs.append(sample.value)
        return outputs, device.accesses

    def wanted(self, timesteps=None):
        sample, outputs = self.sample, []
        for t in self.stock.timesteps if timesteps is None else timesteps:
            sample = self.stock.step(0.5 * self.stock.scale_model_input(sample, t), t, sample).prev_sample
            outputs.append(sample)
        return outputs


def by_hand(scheduler):
    scheduler.timesteps = (scheduler.timesteps + 3)[1:]
    return scheduler.timesteps


def in_place(scheduler):
    for number, t in enumerate(scheduler.timesteps):
        if number == 3:
            scheduler.timesteps.sub_(5)
        yield t


def taken_oddly(scheduler):
    return [t for pair in scheduler.timesteps.view(3, 2) for t in pair[1:].squeeze(0)[None]]


# What a loop goes through, the same of stock's timesteps on the host, what is read, and what is told.
LOOPS = {
    "no elements": ("DDIM", lambda s: [t.clone() for t in s.timesteps], list, None, UNKNOWN),
    "no elements, of a solver": ("DPMSolverMultistep", lambda s: [t.clone() for t in s.timesteps], list, None, UNKNOWN),
    "elements of a view": ("DDIM", taken_oddly, lambda times: times[1::2], [], None),
    # On the host a tensor of one timestep would not mix with tensors on the device, as a scalar does.
    "tensors of one": ("EulerDiscrete", lambda s: [t[None] for t in s.timesteps], lambda t: t[:, None], None, UNKNOWN),
    "set by hand": ("DDIM", by_hand, lambda times: times[1:] + 3, ["_to_copy"], None),
    "changed in place": ("DDIM", in_place, lambda times: times - 5 * (torch.arange(6) >= 3), ["_to_copy"], None),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.share(1)
def test_timesteps_of_any_kind(name):
    """Those that are no elements of scheduler.timesteps are left to stock, which reads them."""
    scheduler, timesteps, of_stock, read, told = LOOPS[name]
    pair = OnDevice(scheduler)
    got, accesses = pair.loop(timesteps)
    assert accesses == read if told is None else accesses
    assert equal(got, pair.wanted(of_stock(pair.stock.timesteps)))
    assert pair.plan.log.rows() == ([] if told is None else [("", told, 6)])


def test_under_inference_mode():
    """Tensors made there do not count their changes: set_timesteps leaves one that does."""
    pair = OnDevice("DDIM")
    with torch.inference_mode():
        got, accesses = pair.loop()
    assert accesses == [] and not pair.ours.timesteps.is_inference()
    assert equal(got, pair.wanted())


def test_noise_from_a_generator_on_the_host_is_counted():
    pair = OnDevice("DDIM")
    for eta, copies in ((0.0, 0), (1.0, 6)):
        _, accesses = pair.loop(generator=torch.Generator().manual_seed(0), eta=eta)
        assert accesses == ["copy to the device"] * copies
    assert pair.plan.log.rows() == [("", HOST_NOISE, 6)]


def test_an_error_in_a_step_leaves_the_timesteps_on_the_device():
    pair = OnDevice("DDIM")
    with pytest.raises(RuntimeError), EmulatedDevice():
        pair.ours.set_timesteps(6, device="meta")
        pair.ours.step(torch.zeros(3, 3), pair.ours.timesteps[0], EmulatedDevice.put(pair.sample))
    assert isinstance(pair.ours.timesteps, Far)
