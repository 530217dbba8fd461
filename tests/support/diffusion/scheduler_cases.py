"""Every scheduler and the options it is tried with."""

import inspect

from support.everything import EVERYTHING

SPACINGS = [{"timestep_spacing": spacing} for spacing in ("leading", "linspace", "trailing")]
SIGMAS = [{"use_karras_sigmas": True}, {"use_exponential_sigmas": True}, {"use_beta_sigmas": True}]
V = {"prediction_type": "v_prediction"}
X0 = {"prediction_type": "sample"}
THRESHOLD = {"thresholding": True}
ZERO_SNR = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"} | V
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}

# What every scheduler is made with that knows it.
COMMON = [
    *SPACINGS,
    *SIGMAS,
    V,
    X0,
    THRESHOLD,
    ZERO_SNR,
    FLOW,
    {"final_sigmas_type": "sigma_min"},
    *({"solver_order": order} for order in (1, 3)),
]
WITHOUT_X0 = ("PNDM", "EulerAncestralDiscrete", "KDPM2Discrete", "KDPM2AncestralDiscrete")  # refused by stock
# What else a scheduler is made with; what set_timesteps and step get besides.
OWN: dict[str, list[dict]] = {
    "DDIM": [
        {"clip_sample": False},
        {"set_alpha_to_one": False},
        {"step": {"eta": 1.0}},
        {"step": {"eta": 0.5, "use_clipped_model_output": True}},
    ],
    "DDPM": [
        {"variance_type": "fixed_small_log"},
        {"variance_type": "fixed_large"},
        {"timesteps": [900, 700, 350, 20]},
    ],
    "PNDM": [{"skip_prk_steps": True}, {"skip_prk_steps": True, "set_alpha_to_one": True}],
    "LCM": [{"original_inference_steps": 100}, {"timesteps": [799, 499, 299]}],
    "TCD": [{"timesteps": [799, 499, 299]}, {"step": {"eta": 0.0}}, {"step": {"eta": 1.0}}],
    "EulerDiscrete": [
        {"interpolation_type": "log_linear"},
        {"step": {"s_churn": 2.0, "s_noise": 1.01}},
        {"timesteps": [900.0, 700.0, 350.0, 20.0]},
        {"sigmas": [10.0, 5.0, 1.0, 0.0]},
    ],
    "EulerAncestralDiscrete": [],
    "HeunDiscrete": [{"clip_sample": True}, {"timesteps": [900, 700, 350, 20]}],
    "LMSDiscrete": [{"step": {"order": 2}}],
    "KDPM2Discrete": [],
    "KDPM2AncestralDiscrete": [],
    "DPMSolverMultistep": [
        {"use_lu_lambdas": True},
        {"algorithm_type": "sde-dpmsolver++"},
        {"algorithm_type": "sde-dpmsolver", "final_sigmas_type": "sigma_min"},
        {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"},
        {"algorithm_type": "sde-dpmsolver++", "solver_type": "heun"} | V,
        {"algorithm_type": "sde-dpmsolver++", "use_karras_sigmas": True, "euler_at_final": True},
        {"solver_type": "heun", "lower_order_final": False},
        {"timesteps": [900, 700, 350, 20]},
    ],
    "DPMSolverSinglestep": [{"algorithm_type": "sde-dpmsolver++"}],
    "UniPCMultistep": [
        {"solver_type": "bh1", "solver_order": 3, "final_sigmas_type": "sigma_min"},
        {"predict_x0": False, "final_sigmas_type": "sigma_min"},
        {"disable_corrector": [1, 2]},
        {"lower_order_final": False, "final_sigmas_type": "sigma_min"},
    ],
    "DEISMultistep": [],
    "FlowMatchEulerDiscrete": [
        {"shift": 3.0},
        {"use_dynamic_shifting": True, "set_timesteps": {"mu": 1.1}},
        {"stochastic_sampling": True},
        {"invert_sigmas": True},
        {"shift_terminal": 0.1},
        {"sigmas": [1.0, 0.7, 0.4, 0.1]},
    ],
}
NAMES = list(OWN)


def cases(name: str) -> list[dict]:
    """The configuration of a scheduler as it comes, and each option."""
    import diffusers

    known = inspect.signature(getattr(diffusers, f"{name}Scheduler").__init__).parameters
    common = [one for one in COMMON if one.keys() <= known.keys() and (one is not X0 or name not in WITHOUT_X0)]
    return [{}, *common, *OWN[name]]


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
        for turn, name in enumerate(NAMES)
        for number, case in enumerate(cases(name))
        if EVERYTHING or number == 0 or (turn + number) % 2
    ]
