"""Schedulers on a GPU: nothing waits for the device inside a loop, and the numbers are stock's."""

import copy
import inspect

import pytest
import torch

import accel
from support.diffusion.scheduler_loops import optimized

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
V = {"prediction_type": "v_prediction"}
CASES = [
    *((name, {}) for name in ("DDIM", "DDPM", "PNDM", "LCM", "TCD", "HeunDiscrete", "LMSDiscrete", "DEISMultistep")),
    *((name, {}) for name in ("KDPM2Discrete", "KDPM2AncestralDiscrete", "DPMSolverSinglestep", "DPMSolverSDE")),
    *((name, {}) for name in ("EulerDiscrete", "EulerAncestralDiscrete", "DPMSolverMultistep", "UniPCMultistep")),
    ("DDIM", {"eta": 1.0}),
    ("DDIM", {"thresholding": True}),
    ("DDIM", {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"} | V),
    ("DDPM", {"variance_type": "fixed_small_log"} | V),
    ("DDPM", {"variance_type": "fixed_large", "prediction_type": "sample"}),
    ("PNDM", {"skip_prk_steps": True}),
    ("LCM", {"thresholding": True} | V),
    ("TCD", {"eta": 1.0}),
    ("EulerDiscrete", {"use_karras_sigmas": True}),
    ("EulerDiscrete", {"timestep_type": "continuous", "sigma_min": 0.002, "sigma_max": 700.0} | V),
    ("EulerDiscrete", {"s_churn": 2.0}),
    ("HeunDiscrete", {"use_karras_sigmas": True} | V),
    ("DPMSolverMultistep", {"algorithm_type": "sde-dpmsolver++", "use_karras_sigmas": True}),
    ("DPMSolverMultistep", {"solver_order": 3, "thresholding": True}),
    ("DPMSolverMultistep", FLOW),
    ("DEISMultistep", {"solver_order": 3, "thresholding": True}),
    ("UniPCMultistep", {"solver_order": 3}),
    ("UniPCMultistep", {"solver_order": 3, "solver_type": "bh1", "final_sigmas_type": "sigma_min"}),
    ("UniPCMultistep", {"predict_x0": False, "final_sigmas_type": "sigma_min"}),
    ("UniPCMultistep", FLOW),
    ("FlowMatchEulerDiscrete", {"shift": 3.0}),
    ("FlowMatchEulerDiscrete", {"stochastic_sampling": True}),
]
STEP_OPTIONS = ("eta", "s_churn")


def label(value) -> str:
    return value if isinstance(value, str) else ",".join(f"{k}={v}" for k, v in value.items()) or "as it comes"


def make(name, options):
    import diffusers

    if name == "DPMSolverSDE":
        pytest.importorskip("torchsde")
        options = options | {"noise_sampler_seed": 5}
    kind = getattr(diffusers, f"{name}Scheduler")
    known = inspect.signature(kind.__init__).parameters
    config = {key: value for key, value in SD.items() if key in known} | options
    return kind(**{key: value for key, value in config.items() if key not in STEP_OPTIONS})


def denoise(scheduler, dtype, strict, options, start=None, steps=8):
    """All samples of a loop around a made-up model; strict: whatever waits for the GPU raises."""
    generator = torch.Generator("cuda").manual_seed(1)
    sample, noise, drift = (torch.randn(2, 4, 32, 32, generator=generator, device="cuda").to(dtype) for _ in range(3))
    scheduler.set_timesteps(steps, device="cuda")
    timesteps = scheduler.timesteps
    if start is not None:
        timesteps = timesteps[start * scheduler.order :]
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(start * scheduler.order)
        if hasattr(scheduler, "add_noise"):
            sample = scheduler.add_noise(sample, noise, timesteps[:1].repeat(2))
        else:
            sample = scheduler.scale_noise(sample, timesteps[:1].repeat(2), noise)
    kwargs = {key: value for key, value in options.items() if key in STEP_OPTIONS}
    if "generator" in inspect.signature(scheduler.step).parameters:
        kwargs["generator"] = generator
    outputs = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error" if strict else "default")
    try:
        for t in timesteps:
            given = scheduler.scale_model_input(sample, t) if hasattr(scheduler, "scale_model_input") else sample
            sample = scheduler.step(0.8 * given + 0.1 * drift, t, sample, **kwargs, return_dict=False)[0]
            outputs.append(sample)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return outputs


def error(got, exact) -> float:
    return float(max((x.double() - y).abs().max() / y.abs().max() for x, y in zip(got, exact, strict=True)))


def check(got, wanted, scheduler, dtype, options, **call):
    """Equal; LCM within a rounding, since stock rounds what it computes from a timestep on the device to the sample's
    dtype; UniPC, which is added up in another order, as near to the same in float64 as stock is."""
    assert [x.dtype for x in got] == [x.dtype for x in wanted]
    assert all(torch.isfinite(x).all() for x in wanted)
    if not hasattr(scheduler, "multistep_uni_p_bh_update"):
        allowed = torch.finfo(dtype).eps if hasattr(scheduler, "get_scalings_for_boundary_condition_discrete") else 0.0
        assert error(got, [x.double() for x in wanted]) <= allowed
        return
    exact = denoise(copy.deepcopy(scheduler), torch.float64, False, options, **call)
    ours, stock = error(got, exact), error(wanted, exact)
    # In fp32 the host's logarithm and the GPU's differ in the last place, and coefficients are differences of them.
    assert ours <= 2 * stock + max(4 * torch.finfo(dtype).eps, 4e-6), f"{ours:.1e} from float64, stock {stock:.1e}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "options"), CASES, ids=label)
def test_nothing_waits_in_the_loop(name, options, dtype):
    scheduler = make(name, options)
    ours, plan = optimized(scheduler)
    wanted = denoise(copy.deepcopy(scheduler), dtype, False, options)
    for _ in range(2):
        got = denoise(ours, dtype, True, options)
        check(got, wanted, scheduler, dtype, options)
    assert plan.log.rows() == []


@pytest.mark.parametrize("name", ["DDIM", "DPMSolverMultistep"])
def test_stock_waits(name):
    """The debug mode tells: else the test above would show nothing."""
    with pytest.raises(RuntimeError, match="synchroniz"):
        denoise(make(name, {}), torch.float16, True, {})


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", sorted({name for name, _ in CASES}))
def test_image_to_image(name, dtype):
    """A slice of the timesteps after add_noise, which leaves some tables on the GPU; then a whole loop."""
    scheduler = make(name, {})
    ours, _ = optimized(scheduler)
    for start in (3, None):
        wanted = denoise(scheduler, dtype, False, {}, start=start)
        check(denoise(ours, dtype, True, {}, start=start), wanted, scheduler, dtype, {}, start=start)


def test_noise_from_the_host_is_told():
    ours, plan = optimized(make("DDIM", {}))
    ours.set_timesteps(4, device="cuda")
    sample = torch.randn(1, 4, 8, 8, device="cuda")
    for t in ours.timesteps:
        sample = ours.step(sample, t, sample, eta=1.0, generator=torch.Generator().manual_seed(0)).prev_sample
    ((_, reason, calls),) = plan.log.rows()
    assert "CPU generator" in reason and calls == 4


@pytest.mark.parametrize(
    "name", ["DDIM", "PNDM", "LCM", "EulerAncestralDiscrete", "DPMSolverMultistep", "UniPCMultistep"]
)
def test_a_pipeline_waits_for_nothing_between_its_steps(name):
    """From the first step's callback to the last one's, with graphs captured before."""
    from pathlib import Path

    import diffusers

    folder = Path(__file__).parents[3] / "examples" / "models" / "tiny-sd-digits"
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float16).to("cuda")
    pipe.set_progress_bar_config(disable=True)
    accel.optimize(pipe)
    pipe.scheduler = getattr(diffusers, f"{name}Scheduler").from_config(pipe.scheduler.config)
    steps = []

    def watch(pipeline, step, timestep, tensors):
        steps.append(step)
        last = step == pipeline.num_timesteps - 1
        torch.cuda.set_sync_debug_mode("default" if last else "error")
        return tensors

    def draw(**kwargs):
        generator = torch.Generator("cuda").manual_seed(0)
        return pipe(
            "a handwritten seven", num_inference_steps=6, generator=generator, output_type="pt", **kwargs
        ).images

    for _ in range(3):
        ours = draw()
    try:
        watched = draw(callback_on_step_end=watch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(steps) >= 6 and torch.equal(watched, ours)
    assert ("scheduler", "scheduler", "patched", "") in accel.report(pipe).sites
    assert not [row for row in accel.report(pipe).fallbacks if row[0] == "scheduler"]


def test_whole_numbers_as_timesteps_pass_as_in_stock():
    """Euler's step refuses them on a CPU, and on a GPU lets them pass."""
    scheduler = make("EulerDiscrete", {})
    ours, _ = optimized(scheduler)
    results = []
    for one in (scheduler, ours):
        one.set_timesteps(5, device="cuda")
        one.timesteps = one.timesteps.round().long()
        sample = torch.ones(1, 4, 8, 8, device="cuda")
        for t in one.timesteps:
            sample = one.step(0.1 * one.scale_model_input(sample, t), t, sample).prev_sample
        results.append(sample)
    assert torch.equal(*results)
