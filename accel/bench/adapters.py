"""What adapters cost: calls of a model without any, with one and with several, in turns; and what a switch costs."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import accel
from accel.bench.diffusion.cases import CASES
from accel.bench.llm.configs import CONFIGS
from accel.bench.llm.models import beside, build
from accel.bench.timing import compare_times, seconds, synchronize
from accel.comparison import relative_rms
from accel.libraries.adapters import DOWN, UP

PROMPT, TOKENS = 128, 33  # of a call of a language model
PREFIX = "adapter"
CALLS = 6  # before one is timed: buffers are made in the first, kernels chosen in some, and one captures


def usual(device: torch.device) -> list[str]:
    """Names that are measured where none is given."""
    return ["sdxl", "flux", "llama-8b"] if device.type == "cuda" else ["tiny", "tiny-text"]


def plain_subject(name: str, device: torch.device) -> tuple[nn.Module, Callable[[nn.Module, int], torch.Tensor]]:
    """A model with random weights, and call number i of it or a copy. Raises KeyError for an unknown name."""
    on_cpu = device.type != "cuda"
    if name in CASES and CASES[name].entry == "forward":
        case = CASES[name]
        dtype = torch.float32 if on_cpu else case.dtype
        inputs = case.inputs(device, dtype)
        return case.build(device, dtype), lambda model, i: case.call(model, inputs[i % len(inputs)])
    given = name.removesuffix("-text")
    if given not in CONFIGS:
        raise KeyError(name)
    model = build(given, device, torch.float32 if on_cpu else torch.bfloat16)
    ids = torch.arange(PROMPT, device=device)[None] % model.config.get_text_config().vocab_size
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": TOKENS, "do_sample": False}
    return model, lambda model, i: model.generate(ids, **call)


def put_adapters_on(model: nn.Module, count: int, rank: int) -> list[str]:
    """Puts LoRAs of random weights on every linear inside the model's blocks, all active. Returns their names."""
    import peft

    dtype, config = next(model.parameters()).dtype, _config(model, rank)
    names = [f"{PREFIX}{number}" for number in range(count)]
    for name in names:
        peft.inject_adapter_in_model(config, model, adapter_name=name)
    activate(model, names)
    _weaken(model, dtype)
    return names


def _config(model: nn.Module, rank: int) -> Any:
    import peft

    places = list(linears_of_blocks(model))
    return peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=places, init_lora_weights=False)


def linears_of_blocks(model: nn.Module) -> dict[str, nn.Linear]:
    """By path those of torch's own class inside of what repeats."""
    linears = {path: module for path, module in model.named_modules() if type(module) is nn.Linear}
    return {path: one for path, one in linears.items() if any(part.isdigit() for part in path.split("."))}


def _weaken(model: nn.Module, dtype: torch.dtype) -> None:
    """Makes adapters of this dtype, and what they add about as large as what linears give."""
    for path, parameter in model.named_parameters():
        if PREFIX in path:
            parameter.data = parameter.data.to(dtype) * (0.5 if UP in path else 1.0)
    model.requires_grad_(False).eval()


def activate(model: nn.Module, names: list[str]) -> None:
    """Makes these adapters the active ones."""
    for layer in _layers(model):
        layer.set_adapter(names)
    model.requires_grad_(False)


def measure_adapters(
    name: str, device: torch.device, ranks: list[int], counts: list[int], rows: int, budget_s: float
) -> dict:
    """Milliseconds a call of each number of adapters and rank, as a share of the model without any.

    error: of the first output, stock's beside accel's, relative; of tokens, the share that differs. switch_ms: what the
    first call after a switch takes beyond others. rows: of a batch of a language model, each with one of as many
    adapters as there are in a quarter of them; 0 for none. All share the model's own weights.
    """
    model, call = plain_subject(name, device)
    variants: dict[str, nn.Module] = {"plain": model}
    names: dict[str, list[str]] = {}
    for rank in ranks:
        for count in counts:
            twin = beside(model)
            names[f"{count} x {rank}"] = put_adapters_on(twin, count, rank)
            variants[f"{count} x {rank}"] = twin
    errors = {}
    with torch.inference_mode():
        for variant, one in variants.items():
            wanted = call(one, 0)
            accel.optimize(one)
            got, *_ = [call(one, 0) for _ in range(CALLS)]
            errors[variant] = first_error(wanted, got)
        runs = {key: partial(call, one) for key, one in variants.items()}
        times = compare_times(runs, device, budget_s=budget_s)
        plain = times["plain"].median_ms
        found = {
            key: timing.to_dict() | {"ratio": round(timing.median_ms / plain, 4), "error": errors[key]}
            for key, timing in times.items()
        }
        for key, own in names.items():
            found[key]["switch_ms"] = round(_switch_ms(variants[key], own, call, device, times[key].median_ms), 2)
    called = {key: parts_called(one) for key, one in variants.items()}
    if rows and hasattr(model, "generate"):
        variants.clear()
        found |= _by_row(model, rows, ranks[0], device, budget_s)
    return {"name": name, "variants": found, "called": called}


def _by_row(model: Any, rows: int, rank: int, device: torch.device, budget_s: float) -> dict[str, dict]:
    """A batch in which rows have adapters of their own, beside the same batch without."""
    import peft

    names, config = [f"{PREFIX}{number}" for number in range(max(1, rows // 4))], _config(model, rank)
    wrapped = peft.get_peft_model(beside(model), config, adapter_name=names[0])
    for name in names[1:]:
        wrapped.add_adapter(name, config)
    _weaken(wrapped, next(model.parameters()).dtype)
    ids = torch.arange(rows * PROMPT // 4, device=device).view(rows, -1) % model.config.get_text_config().vocab_size
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": TOKENS, "do_sample": False}
    named = {"adapter_names": [names[row % len(names)] for row in range(rows)]}
    plain, by_row = f"{rows} rows, plain", f"{rows} rows, {len(names)} x {rank} by row"
    with torch.inference_mode():
        wanted = wrapped.generate(**call, **named)
        accel.optimize(wrapped)
        error = first_error(wanted, wrapped.generate(**call, **named))
        runs = {plain: lambda _: model.generate(**call), by_row: lambda _: wrapped.generate(**call, **named)}
        times = compare_times(runs, device, budget_s=budget_s)
    ratio = round(times[by_row].median_ms / times[plain].median_ms, 4)
    return {
        plain: times[plain].to_dict() | {"ratio": 1.0, "error": 0.0},
        by_row: times[by_row].to_dict() | {"ratio": ratio, "error": error},
    }


def first_error(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """Of an output, relative; of tokens, the share that differs."""
    whole = not wanted.is_floating_point()
    return round(float((wanted != got).float().mean() if whole else relative_rms(got.float(), wanted.float())), 6)


def _switch_ms(
    model: nn.Module, names: list[str], call: Callable[[nn.Module, int], Any], device: torch.device, usual_ms: float
) -> float:
    """Beyond a call: that of a factor that becomes another one, and a call."""
    synchronize(device)
    start = time.perf_counter()
    for layer in _layers(model):
        layer.set_scale(names[0], 0.7)
    return (time.perf_counter() - start + seconds(partial(call, model, 0), device)) * 1e3 - usual_ms


def _layers(model: nn.Module) -> Iterator[Any]:
    """Those that adapters of low rank are on."""
    return (module for module in model.modules() if DOWN in module._modules)


def parts_called(model: nn.Module) -> list[str]:
    """What runs its own forward, and what fell back to stock."""
    report = accel.report(model)
    told = {reason for *_, status, reason in report.sites if status == "patched" and "own forward" in reason}
    return sorted(told | {reason for _, reason, _ in report.fallbacks})
