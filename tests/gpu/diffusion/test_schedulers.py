"""Schedulers on a GPU: nothing waits for the device inside a loop, and the numbers are stock's."""

import copy

import pytest
import torch

import accel
from accel.diffusion.schedulers import LINEAR
from support.diffusion.drawing import shipped
from support.diffusion.scheduler_cases import FLOW, THRESHOLD, X0, ZERO_SNR, V, label, split
from support.diffusion.scheduler_loops import denoise, equal, largest_error, make, optimized

CASES = [
    *((name, {}) for name in ("DDIM", "DDPM", "PNDM", "LCM", "TCD", "HeunDiscrete", "LMSDiscrete", "DEISMultistep")),
    *((name, {}) for name in ("KDPM2Discrete", "KDPM2AncestralDiscrete", "DPMSolverSinglestep", "DPMSolverSDE")),
    *((name, {}) for name in ("EulerDiscrete", "EulerAncestralDiscrete", "DPMSolverMultistep", "UniPCMultistep")),
    ("DDIM", {"step": {"eta": 1.0}}),
    ("DDIM", THRESHOLD),
    ("DDIM", ZERO_SNR),
    ("DDPM", {"variance_type": "fixed_small_log"} | V),
    ("DDPM", {"variance_type": "fixed_large"} | X0),
    ("PNDM", {"skip_prk_steps": True}),
    ("LCM", THRESHOLD | V),
    ("TCD", {"step": {"eta": 1.0}}),
    ("EulerDiscrete", {"use_karras_sigmas": True}),
    ("EulerDiscrete", {"timestep_type": "continuous", "sigma_min": 0.002, "sigma_max": 700.0} | V),
    ("EulerDiscrete", {"step": {"s_churn": 2.0}}),
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


def made(name, config):
    if name == "DPMSolverSDE":
        pytest.importorskip("torchsde")
        config = config | {"noise_sampler_seed": 5}
    return make(name, **config)


def on_gpu(scheduler, dtype, strict, **call):
    """All samples of a loop; strict: whatever waits for the GPU raises."""
    torch.cuda.synchronize()
    try:
        mode = "error" if strict else "default"
        return denoise(scheduler, "cuda", dtype, begins=lambda: torch.cuda.set_sync_debug_mode(mode), **call)[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check(got, wanted, scheduler, dtype, **call):
    """Equal; LCM within a rounding, since stock rounds what it computes from a timestep on the device to the sample's
    dtype; UniPC, which is added up in another order, as near to the same in float64 as stock is."""
    assert all(torch.isfinite(x).all() for x in wanted)
    if any(hasattr(scheduler, update) for update in LINEAR):
        exact = on_gpu(copy.deepcopy(scheduler), torch.float64, False, **call)
        ours, stock = largest_error(got, exact), largest_error(wanted, exact)
        # In fp32 the host's logarithm and the GPU's differ in the last place, coefficients are differences of them.
        allowed = 2 * stock + max(4 * torch.finfo(dtype).eps, 4e-6)
        assert ours <= allowed, f"{ours:.1e} from float64, stock {stock:.1e}"
    elif hasattr(scheduler, "get_scalings_for_boundary_condition_discrete"):
        assert largest_error(got, [x.double() for x in wanted]) <= torch.finfo(dtype).eps
    else:
        assert equal(got, wanted)
    assert [x.dtype for x in got] == [x.dtype for x in wanted]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "case"), CASES, ids=label)
def test_nothing_waits_in_the_loop(name, case, dtype):
    config, call = split(case)
    scheduler = made(name, config)
    ours, plan = optimized(scheduler)
    wanted = on_gpu(copy.deepcopy(scheduler), dtype, False, **call)
    for _ in range(2):
        check(on_gpu(ours, dtype, True, **call), wanted, scheduler, dtype, **call)
    assert plan.log.rows() == []


@pytest.mark.parametrize("name", ["DDIM", "DPMSolverMultistep"])
def test_stock_waits(name):
    """The debug mode tells: else the test above would show nothing."""
    with pytest.raises(RuntimeError, match="synchroniz"):
        on_gpu(make(name), torch.float16, True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", sorted({name for name, _ in CASES}))
def test_image_to_image(name, dtype):
    """A slice of the timesteps after add_noise, which leaves some tables on the GPU; then a whole loop."""
    scheduler = made(name, {})
    ours, _ = optimized(scheduler)
    for start in (3, None):
        call = {"start": start, "steps": 8}
        wanted = on_gpu(scheduler, dtype, False, **call)
        check(on_gpu(ours, dtype, True, **call), wanted, scheduler, dtype, **call)


def test_noise_from_the_host_is_told():
    ours, plan = optimized(make("DDIM"))
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
    import diffusers

    pipe = accel.optimize(shipped(torch.float16).to("cuda"))
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
    scheduler = make("EulerDiscrete")
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
