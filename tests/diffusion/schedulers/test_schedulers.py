"""Schedulers: no read of the device and no copy inside the loop, and stock's numbers to the bit.

There is no GPU here, so one is emulated: its tensors are meta tensors, which have no values to read, with the values
kept beside them. Every read, and every copy between it and the host, is seen, as is an operation across the two.
"""

import copy
import inspect
import os
import pickle

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import accel
from accel.diffusion.pipeline import LoopStart
from accel.diffusion.schedulers import HOST_NOISE, LINEAR, RULES, UNKNOWN, LinearUpdate, SchedulerStep
from accel.fusion.loop import Loop
from accel.options import Options
from accel.planning.plan import PLAN, Plan, create_context

READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "_linalg_check_errors"}


class Far(torch.Tensor):
    """A tensor on the emulated device: `meta` has its shape, strides and storage, `value` its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, meta, value):
        tensor = torch.Tensor._make_subclass(cls, meta)
        tensor.meta, tensor.value = meta, value
        return tensor


class EmulatedDevice(TorchDispatchMode):
    """While entered, "meta" is a device with values. `accesses`: what the host would have waited for, in order."""

    def __init__(self):
        super().__init__()
        self.accesses: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        far = [leaf for leaf in leaves if isinstance(leaf, Far)]
        near = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Far)]
        devices = {leaf.type for leaf in leaves if isinstance(leaf, torch.device)}
        name = func._schema.name.partition("::")[2]
        if not far and "meta" not in devices:
            return func(*args, **(kwargs or {}))
        if any(tensor.is_meta for tensor in near):
            raise NotImplementedError(f"{name} of a tensor whose values torch made on the device by itself")
        if far and any(tensor.dim() for tensor in near):
            raise RuntimeError(f"{name}: tensors on two devices")

        def numbers(leaf):
            if isinstance(leaf, torch.device) and leaf.type == "meta":
                return torch.device("cpu")
            return leaf.value if isinstance(leaf, Far) else leaf

        given, named = pytree.tree_unflatten([numbers(leaf) for leaf in leaves], spec)
        value = func(*given, **named)
        if far and (name in READS or "cpu" in devices):
            self.accesses.append(name)
            return pytree.tree_map(self.put, value) if name == "nonzero" else value
        if not far:
            self.accesses += ["copy to the device"] if near else []
            return pytree.tree_map(self.put, value)
        metas = [leaf.meta if isinstance(leaf, Far) else leaf for leaf in leaves]
        given, named = pytree.tree_unflatten(metas, spec)
        arguments = {id(tensor.value): tensor for tensor in far}  # an operation in place returns one of them

        def paired(number, meta):
            if not isinstance(number, torch.Tensor):
                return number
            return arguments[id(number)] if id(number) in arguments else Far(meta, number)

        return pytree.tree_map(paired, value, func(*given, **named))

    @staticmethod
    def put(value):
        if not isinstance(value, torch.Tensor):
            return value
        return Far(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta"), value)


@pytest.fixture(autouse=True)
def no_chatter():
    import diffusers

    level = diffusers.utils.logging.get_verbosity()
    diffusers.utils.logging.set_verbosity_error()
    yield
    diffusers.utils.logging.set_verbosity(level)


EVERYTHING = bool(os.environ.get("ACCEL_TEST_EVERYTHING"))
SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def make(name: str, **config):
    import diffusers

    kind = getattr(diffusers, f"{name}Scheduler")
    known = inspect.signature(kind.__init__).parameters
    return kind(**{key: value for key, value in SD.items() if key in known}, **config)


def optimized(scheduler):
    """A patched copy of a scheduler, as part of a pipeline is: and its plan."""
    scheduler = copy.deepcopy(scheduler)
    plan = Plan(scheduler, RULES, create_context(Options()))
    plan.apply()
    return scheduler, plan


def denoise(scheduler, device="cpu", dtype=torch.float32, steps=6, start=None, begin=True, timesteps=None, **step):
    """A pipeline's loop around a made-up model: all samples, and what else the steps returned, on the host.

    start: where an image is taken in, as in image-to-image, with or without a call of set_begin_index.
    """
    mode = EmulatedDevice() if device == "meta" else None
    if mode is not None:
        with mode:
            outputs, accesses = _denoise(scheduler, mode, dtype, steps, start, begin, timesteps, step)
        return [output.value for output in outputs], accesses
    return _denoise(scheduler, mode, dtype, steps, start, begin, timesteps, step)


def _denoise(scheduler, mode, dtype, steps, start, begin, timesteps, step):
    device = "cpu" if mode is None else "meta"
    generator = torch.Generator().manual_seed(1)
    sample, noise, drift = (torch.randn(2, 4, 8, 8, generator=generator).to(dtype).to(device) for _ in range(3))
    scheduler.set_timesteps(**({"num_inference_steps": steps} if timesteps is None else timesteps), device=device)
    left = scheduler.timesteps
    if start is not None:
        left = left[start * scheduler.order :]
        if begin and hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(start * scheduler.order)
        sample = _with_noise(scheduler, sample, noise, left[:1].repeat(2))
    outputs = []
    torch.manual_seed(2)
    if mode is not None:
        mode.accesses.clear()
    for number, t in enumerate(left):
        given = scheduler.scale_model_input(sample, t) if hasattr(scheduler, "scale_model_input") else sample
        predicted = 0.8 * given + (0.1 + 0.01 * number) * drift
        sample, *more = scheduler.step(predicted, t, sample, **step, return_dict=False)
        outputs += [sample, *(output for output in more if output is not None)]
    return outputs, [] if mode is None else list(mode.accesses)


def _with_noise(scheduler, sample, noise, timesteps):
    if isinstance(sample, Far) and hasattr(scheduler, "sigmas"):  # they are indexed by a list, which is not emulated
        return EmulatedDevice.put(_with_noise(scheduler, sample.value, noise.value, timesteps.value))
    if hasattr(scheduler, "add_noise"):
        return scheduler.add_noise(sample, noise, timesteps)
    return scheduler.scale_noise(sample, timesteps, noise)


SPACINGS = [{"timestep_spacing": spacing} for spacing in ("leading", "linspace", "trailing")]
SIGMAS = [{"use_karras_sigmas": True}, {"use_exponential_sigmas": True}, {"use_beta_sigmas": True}]
V = {"prediction_type": "v_prediction"}
X0 = {"prediction_type": "sample"}
THRESHOLD = {"thresholding": True}
ZERO_SNR = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"} | V
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}

# What a scheduler is made with; what set_timesteps and step get besides.
CASES: dict[str, list[dict]] = {
    "DDIM": [
        *SPACINGS,
        V,
        X0,
        THRESHOLD,
        ZERO_SNR,
        {"clip_sample": False},
        {"set_alpha_to_one": False},
        {"step": {"eta": 1.0}},
        {"step": {"eta": 0.5, "use_clipped_model_output": True}},
    ],
    "DDPM": [
        *SPACINGS,
        V,
        X0,
        THRESHOLD,
        ZERO_SNR,
        {"variance_type": "fixed_small_log"},
        {"variance_type": "fixed_large"},
        {"timesteps": [900, 700, 350, 20]},
    ],
    "PNDM": [*SPACINGS, V, {"skip_prk_steps": True}, {"skip_prk_steps": True, "set_alpha_to_one": True}],
    "LCM": [V, X0, THRESHOLD, ZERO_SNR, {"original_inference_steps": 100}, {"timesteps": [799, 499, 299]}],
    "TCD": [V, X0, ZERO_SNR, {"timesteps": [799, 499, 299]}, {"step": {"eta": 0.0}}, {"step": {"eta": 1.0}}],
    "EulerDiscrete": [
        *SPACINGS,
        *SIGMAS,
        V,
        X0,
        ZERO_SNR,
        {"final_sigmas_type": "sigma_min"},
        {"interpolation_type": "log_linear"},
        {"step": {"s_churn": 2.0, "s_noise": 1.01}},
        {"timesteps": [900.0, 700.0, 350.0, 20.0]},
        {"sigmas": [10.0, 5.0, 1.0, 0.0]},
    ],
    "EulerAncestralDiscrete": [*SPACINGS, V, ZERO_SNR],
    "HeunDiscrete": [*SPACINGS, *SIGMAS, V, X0, {"clip_sample": True}, {"timesteps": [900, 700, 350, 20]}],
    "LMSDiscrete": [*SPACINGS, *SIGMAS, V, X0, {"step": {"order": 2}}],
    "KDPM2Discrete": [*SPACINGS, *SIGMAS, V],
    "KDPM2AncestralDiscrete": [*SPACINGS, *SIGMAS, V],
    "DPMSolverMultistep": [
        *SPACINGS,
        *SIGMAS,
        {"use_lu_lambdas": True},
        V,
        X0,
        THRESHOLD,
        ZERO_SNR,
        FLOW,
        *({"solver_order": order} for order in (1, 3)),
        {"algorithm_type": "sde-dpmsolver++"},
        {"algorithm_type": "sde-dpmsolver", "final_sigmas_type": "sigma_min"},
        {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"},
        {"algorithm_type": "sde-dpmsolver++", "solver_type": "heun"} | V,
        {"algorithm_type": "sde-dpmsolver++", "use_karras_sigmas": True, "euler_at_final": True},
        {"solver_type": "heun", "lower_order_final": False},
        {"final_sigmas_type": "sigma_min"},
        {"timesteps": [900, 700, 350, 20]},
    ],
    "DPMSolverSinglestep": [
        *SIGMAS,
        V,
        THRESHOLD,
        {"solver_order": 1},
        {"solver_order": 3},
        {"algorithm_type": "sde-dpmsolver++"},
    ],
    "UniPCMultistep": [
        *SPACINGS,
        *SIGMAS,
        V,
        X0,
        THRESHOLD,
        ZERO_SNR,
        FLOW,
        *({"solver_order": order} for order in (1, 3)),
        {"solver_type": "bh1", "solver_order": 3, "final_sigmas_type": "sigma_min"},
        {"predict_x0": False, "final_sigmas_type": "sigma_min"},
        {"disable_corrector": [1, 2]},
        {"lower_order_final": False, "final_sigmas_type": "sigma_min"},
    ],
    "DEISMultistep": [*SPACINGS, *SIGMAS, V, X0, THRESHOLD, {"solver_order": 1}, {"solver_order": 3}],
    "FlowMatchEulerDiscrete": [
        {"shift": 3.0},
        {"use_dynamic_shifting": True, "set_timesteps": {"mu": 1.1}},
        {"stochastic_sampling": True},
        {"invert_sigmas": True},
        {"shift_terminal": 0.1},
        *SIGMAS,
        {"sigmas": [1.0, 0.7, 0.4, 0.1]},
    ],
}
NAMES = list(CASES)


def split(case: dict) -> tuple[dict, dict]:
    """The configuration, and the keywords of `denoise`."""
    case = dict(case)
    step, schedule = case.pop("step", {}), case.pop("set_timesteps", {})
    own = {name: case.pop(name) for name in ("timesteps", "sigmas") if name in case}
    timesteps = own or ({"num_inference_steps": 6} | schedule if schedule else None)
    return case, ({"timesteps": timesteps} if timesteps else {}) | step


def label(value) -> str:
    return value if isinstance(value, str) else ",".join(f"{k}={v}" for k, v in value.items()) or "as it comes"


def all_cases() -> list[tuple[str, dict]]:
    """The configuration as it comes, and each option; without ACCEL_TEST_EVERYTHING=1 every second option, in turn."""
    return [
        (name, case)
        for turn, (name, cases) in enumerate(CASES.items())
        for number, case in enumerate(({}, *cases))
        if EVERYTHING or number == 0 or (turn + number) % 2
    ]


def equal(got, wanted) -> bool:
    return [x.dtype for x in got] == [x.dtype for x in wanted] and all(map(torch.equal, got, wanted))


def error(got, exact) -> float:
    """The largest one, relative to the largest value of its step."""
    return float(max(((x.double() - y).abs().max() / y.abs().max() for x, y in zip(got, exact, strict=True))))


def check(got, wanted, scheduler, dtype=torch.float32, **call):
    """Equal; UniPC, which is added up in another order, is as near to the same in float64 as stock is."""
    assert all(torch.isfinite(output).all() for output in wanted)
    if not any(hasattr(scheduler, update) for update in LINEAR):
        assert equal(got, wanted)
        return
    exact, _ = denoise(scheduler, dtype=torch.float64, **call)
    assert [x.dtype for x in got] == [x.dtype for x in wanted]
    assert error(got, exact) <= 2 * error(wanted, exact) + 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize(("name", "case"), all_cases(), ids=label)
def test_every_option(name, case):
    config, call = split(case)
    scheduler = make(name, **config)
    wanted, _ = denoise(copy.deepcopy(scheduler), **call)
    ours, plan = optimized(scheduler)
    on_host, _ = denoise(ours, **call)
    assert equal(on_host, wanted)
    got, accesses = denoise(ours, "meta", **call)
    assert accesses == []
    check(got, wanted, scheduler, **call)
    assert plan.ledger.rows() == []


@pytest.mark.parametrize("name", NAMES)
def test_stock_is_seen_to_read(name):
    """The emulated device tells: else all of the above would hold for stock too."""
    scheduler = make(name)
    wanted, _ = denoise(copy.deepcopy(scheduler))
    got, accesses = denoise(scheduler, "meta")
    assert {"nonzero", "_local_scalar_dense"} & set(accesses)
    assert equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.share(2)
def test_half_precision(name, dtype):
    scheduler = make(name)
    wanted, _ = denoise(copy.deepcopy(scheduler), dtype=dtype)
    got, accesses = denoise(optimized(scheduler)[0], "meta", dtype)
    assert accesses == []
    check(got, wanted, scheduler, dtype)


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        (name, begin)
        for turn, name in enumerate(NAMES)
        for begin in (True, False)
        if EVERYTHING or begin is (turn % 2 > 0)
    ],
)
def test_image_to_image(name, begin):
    """A slice of the timesteps, an image with noise added; twice, with another number of steps, then from the start."""
    scheduler = make(name)
    ours, _ = optimized(scheduler)
    for call in ({"start": 2, "begin": begin}, {"start": 4, "steps": 9, "begin": begin}, {}, {"steps": 3}):
        if name == "LCM" and "start" in call:
            call = call | {"timesteps": {"num_inference_steps": call.get("steps", 6), "strength": 1.0}}
        if name == "PNDM" and call.get("steps") == 3:
            continue  # stock's Runge-Kutta steps need more
        wanted, _ = denoise(scheduler, **call)
        got, accesses = denoise(ours, "meta", **call)
        assert accesses == []
        check(got, wanted, copy.deepcopy(scheduler), **call)


def test_continuous_timesteps():
    """torch.Tensor(list of tensors), in set_timesteps, is not emulated: on the host only."""
    scheduler = make("EulerDiscrete", timestep_type="continuous", sigma_min=0.002, sigma_max=700.0, **V)
    assert equal(denoise(optimized(scheduler)[0])[0], denoise(scheduler)[0])


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


class OnDevice:
    """A scheduler with its timesteps on the emulated device, and a loop over whatever tensors one likes."""

    def __init__(self, name: str, steps: int = 6, **config):
        self.stock = make(name, **config)
        self.ours, self.plan = optimized(self.stock)
        self.sample = torch.randn(1, 4, 8, 8)
        self.steps = steps
        self.stock.set_timesteps(steps)

    def loop(self, timesteps=None, **step):
        """All samples, and accesses; timesteps: a function of scheduler.timesteps."""
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


@pytest.mark.parametrize("name", ["DDIM", "DPMSolverMultistep"])
def test_a_timestep_that_is_no_element_is_read_and_counted(name):
    pair = OnDevice(name)
    got, accesses = pair.loop(lambda scheduler: [t.clone() for t in scheduler.timesteps])
    assert accesses and equal(got, pair.wanted())
    assert pair.plan.ledger.rows() == [("", UNKNOWN, 6)]


def test_elements_are_found_however_they_are_taken():
    pair = OnDevice("DDIM")
    got, accesses = pair.loop(
        lambda scheduler: [t for pair in scheduler.timesteps.view(3, 2) for t in pair[1:].squeeze(0)[None]]
    )
    assert accesses == []
    assert equal(got, pair.wanted(pair.stock.timesteps[1::2]))
    assert pair.plan.ledger.rows() == []


def test_a_tensor_of_one_timestep_is_left_to_stock():
    """On the host it would not mix with tensors on the device, as a scalar does."""
    pair = OnDevice("EulerDiscrete")
    got, _ = pair.loop(lambda scheduler: [t[None] for t in scheduler.timesteps])
    assert equal(got, pair.wanted([t[None] for t in pair.stock.timesteps]))
    assert pair.plan.ledger.rows() == [("", UNKNOWN, 6)]


def test_timesteps_set_by_hand_are_copied_once():
    pair = OnDevice("DDIM")

    def by_hand(scheduler):
        scheduler.timesteps = (scheduler.timesteps + 3)[1:]
        return scheduler.timesteps

    got, accesses = pair.loop(by_hand)
    assert accesses == ["_to_copy"]
    assert equal(got, pair.wanted(pair.stock.timesteps[1:] + 3))


def test_timesteps_changed_in_place_are_noticed():
    pair = OnDevice("DDIM")

    def changed(scheduler):
        for number, t in enumerate(scheduler.timesteps):
            if number == 3:
                scheduler.timesteps.sub_(5)
            yield t

    got, accesses = pair.loop(changed)
    assert accesses == ["_to_copy"]
    assert equal(got, pair.wanted([t - 5 * (n >= 3) for n, t in enumerate(pair.stock.timesteps)]))
    assert pair.plan.ledger.rows() == []


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
    assert pair.plan.ledger.rows() == [("", HOST_NOISE, 6)]


def test_an_error_in_a_step_leaves_the_timesteps_on_the_device():
    pair = OnDevice("DDIM")
    with pytest.raises(RuntimeError), EmulatedDevice():
        pair.ours.set_timesteps(6, device="meta")
        pair.ours.step(torch.zeros(3, 3), pair.ours.timesteps[0], EmulatedDevice.put(pair.sample))
    assert isinstance(pair.ours.timesteps, Far)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.share(2)
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


def foreign_schedulers():
    from diffusers import DDIMScheduler, KarrasVeScheduler

    class Mine(DDIMScheduler):
        pass

    wrapped = DDIMScheduler()
    wrapped.step = lambda *args, **kwargs: DDIMScheduler.step(wrapped, *args, **kwargs)
    return [
        (Mine(), "Mine is not a scheduler of diffusers"),
        (wrapped, "DDIMScheduler.step was replaced"),
        (KarrasVeScheduler(), "KarrasVeScheduler.step takes model_output, sigma_hat"),
    ]


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


def draw(pipe, **kwargs):
    call = {"num_inference_steps": 3, "generator": torch.Generator().manual_seed(0), "output_type": "np"} | kwargs
    return pipe("a handwritten five", **call).images


def rows(pipe):
    return [site for site in accel.report(pipe).sites if site[0] == "scheduler"]


def loops(pipe) -> int:
    return vars(pipe)["progress_bar"].context.of(Loop).number


def test_a_pipeline_is_optimized_and_restored_with_its_scheduler(pipe):
    draw(pipe)  # which leaves settings of the call in the pipeline, optimized or not
    before = dict(vars(pipe)), dict(vars(pipe.scheduler))
    accel.restore(accel.optimize(pipe))
    assert (vars(pipe), vars(pipe.scheduler)) == before
    accel.optimize(pipe)
    assert rows(pipe) == [("scheduler", "scheduler", "patched", "")]
    accel.optimize(pipe)
    assert rows(pipe) == [("scheduler", "scheduler", "patched", "")]
    draw(pipe)
    accel.restore(pipe)
    assert rows(pipe) == []
    assert vars(pipe) == before[0]
    assert set(vars(pipe.scheduler)) == set(before[1])


def test_the_call_is_as_before(pipe, capsys):
    """Progress bar and its settings, loops counted, callbacks; a progress bar of the user's own stays in use."""
    accel.optimize(pipe)
    pipe.set_progress_bar_config(disable=False, desc="drawing")
    assert loops(pipe) == 0
    for number in (1, 2):
        draw(pipe)
        assert loops(pipe) == number
    assert "drawing: 100%" in capsys.readouterr().err
    assert [*pipe.progress_bar([1, 2])] == [1, 2]
    accel.restore(pipe)
    calls = []
    pipe.progress_bar = lambda **kwargs: calls.append(kwargs) or type(pipe).progress_bar(pipe, **kwargs)
    own = vars(pipe)["progress_bar"]
    draw(accel.optimize(pipe))
    assert calls == [{"total": 3}]
    assert vars(accel.restore(pipe))["progress_bar"] is own


def test_another_scheduler_is_noticed(pipe):
    from diffusers import EulerDiscreteScheduler, UniPCMultistepScheduler

    first = pipe.scheduler
    accel.optimize(pipe)
    swapped = [kind.from_config(first.config) for kind in (EulerDiscreteScheduler, UniPCMultistepScheduler)]
    before = [set(vars(scheduler)) for scheduler in swapped]
    for scheduler in swapped:
        pipe.scheduler = scheduler
        assert rows(pipe) == []
        ours = draw(pipe)
        assert rows(pipe) == [("scheduler", "scheduler", "patched", "")]
        assert isinstance(vars(scheduler)["step"], SchedulerStep) and isinstance(vars(first)["step"], SchedulerStep)
        pipe.scheduler = type(scheduler).from_config(first.config)
        accel_images, pipe.scheduler = draw(pipe), scheduler
        assert np.array_equal(ours, accel_images)
    pipe.scheduler = first
    draw(pipe)
    accel.restore(pipe)
    assert "step" not in vars(first)
    for scheduler, names in zip(swapped, before, strict=True):
        assert not any(isinstance(value, SchedulerStep | Plan) for value in vars(scheduler).values())
        assert set(vars(scheduler)) >= names


def test_swapped_and_restored_before_the_next_call(pipe):
    first = pipe.scheduler
    accel.optimize(pipe)
    pipe.scheduler = type(first).from_config(first.config)
    accel.restore(pipe)
    assert PLAN not in vars(first) and "step" not in vars(first)
    assert PLAN not in vars(pipe.scheduler)


def test_a_foreign_scheduler_put_in_later(pipe):
    accel.optimize(pipe, strict=True)
    (mine, reason), *_ = foreign_schedulers()
    pipe.scheduler = mine
    draw(pipe)
    assert rows(pipe)[0][2] == "skipped" and reason in rows(pipe)[0][3]


def test_a_scheduler_shared_by_two_pipelines(pipe):
    from diffusers import StableDiffusionImg2ImgPipeline

    before = set(vars(pipe.scheduler))
    accel.optimize(pipe)
    other = StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    assert rows(other) == rows(pipe) != []
    accel.optimize(other)
    accel.restore(pipe)
    assert set(vars(pipe.scheduler)) == before
    draw(pipe)
    accel.restore(other)
    assert set(vars(pipe.scheduler)) == before and "progress_bar" not in vars(other)


def pickled(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("way", [copy.deepcopy, pickled])
def test_a_copy_of_a_pipeline_stands_alone(pipe, way):
    from diffusers import EulerDiscreteScheduler

    accel.optimize(pipe)
    wanted = draw(pipe)
    twin = way(pipe)
    start = vars(twin)["progress_bar"]
    assert isinstance(start, LoopStart) and start.pipe is twin and start.current["scheduler"] is twin.scheduler
    accel.restore(pipe)
    assert rows(twin) and vars(twin.scheduler)["step"].scheduler is twin.scheduler
    assert np.array_equal(draw(twin), wanted)
    assert loops(twin) == 1  # a copy counts its own
    twin.scheduler = EulerDiscreteScheduler.from_config(twin.scheduler.config)
    draw(twin)
    assert rows(twin)
    accel.restore(twin)
    assert "progress_bar" not in vars(twin) and "step" not in vars(twin.scheduler)


def test_fallbacks_are_told_once_and_of_the_right_part(pipe):
    accel.optimize(pipe)
    pipe.unet.train()
    draw(pipe)
    assert {path.partition(".")[0] for path, _, _ in accel.report(pipe).fallbacks} == {"unet"}
