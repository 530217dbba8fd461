"""Every scheduler and the options it is tried with."""

from support.everything import EVERYTHING

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
