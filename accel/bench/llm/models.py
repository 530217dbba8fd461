"""Models to measure, with random weights or from a folder; and stock beside them over the same weights."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accel_kernels.gemm.quantized_weight import mxfp4_weight

from accel.bench.llm.configs import CONFIGS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEED = 0


def build(model: str, device: torch.device, dtype: torch.dtype) -> "PreTrainedModel":
    """The model of this name with random weights made on the device, or the saved one of this folder.

    Its end-of-text token is one that it cannot write: generate() looks for it as ever, and never finds it.
    Raises KeyError for a name that is neither, ValueError or TypeError for a folder without a causal language model.
    """
    if model in CONFIGS:
        made = from_config(config_of(model), device, dtype)
        if model.endswith("-mxfp4"):
            round_to_mxfp4(made)
    elif Path(model).is_dir():
        from accel import saved

        made = saved.load_saved(Path(model), dtype, device)
    else:
        raise KeyError(model)
    from accel.llm.recording.inputs import causal

    if not causal(made):
        raise TypeError(f"{model} holds a {type(made).__name__}, which is no causal language model")
    return endless(made.requires_grad_(False))


def config_of(name: str) -> Any:
    """The published configuration of this name."""
    from transformers import AutoConfig

    kind, given = CONFIGS[name]
    return AutoConfig.for_model(kind, **given)


def from_config(config: Any, device: torch.device, dtype: torch.dtype) -> "PreTrainedModel":
    """The model with random weights, made on the device."""
    from transformers import AutoModelForCausalLM

    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(SEED)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def build_by_layers(name: str, device: torch.device, weights: str) -> "PreTrainedModel":
    """The model of this name, its linears in fewer bits, where all of it would not fit in 16: one random layer is
    rounded, and copied on the CPU as often as the model has layers.
    """
    import accel

    config = config_of(name)
    number, config.num_hidden_layers = config.num_hidden_layers, 1
    model = endless(accel.quantize(from_config(config, device, torch.bfloat16), weights).requires_grad_(False)).cpu()
    layers = model.get_decoder().layers
    for i in range(1, number):
        layers.append(copy.deepcopy(layers[0]))
        layers[i].self_attn.layer_idx = i
    model.config.num_hidden_layers = number
    return model


@torch.no_grad()
def round_to_mxfp4(model: "PreTrainedModel") -> None:
    """Gives transposed stacks of experts values as a file in MXFP4 has them."""
    for stack in (one for one in model.parameters() if one.dim() == 3):
        for matrix in stack:
            matrix.copy_(mxfp4_weight(matrix.t()).dequantized(matrix.dtype).t())


def endless(model: "PreTrainedModel") -> "PreTrainedModel":
    """The model itself, which now never writes the end of a text."""
    config = model.generation_config
    config.eos_token_id = model.config.get_text_config().vocab_size
    if config.pad_token_id is None:
        config.pad_token_id = 0
    return model


def beside(model: "PreTrainedModel") -> "PreTrainedModel":
    """A second, stock model over the very same parameters and buffers; to be made before the first is optimized."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def prompt(model: "PreTrainedModel", rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """Random input_ids and a mask of ones, (rows, tokens), as a tokenizer gives them."""
    from accel.llm.recording.inputs import example_inputs

    return example_inputs(model, rows, tokens, padded=False, seed=SEED)


def requests(model: "PreTrainedModel", number: int, shortest: int, longest: int) -> list[list[int]]:
    """Random token ids of so many prompts, each of a length of its own."""
    vocabulary, g = model.config.get_text_config().vocab_size, torch.Generator().manual_seed(SEED)
    lengths = torch.randint(shortest, longest + 1, (number,), generator=g).tolist()
    return [torch.randint(1, vocabulary, (length,), generator=g).tolist() for length in lengths]


def answers(model: "PreTrainedModel", prompts: list[list[int]], new: int) -> list[list[int]]:
    """What `generate_batch` adds to each prompt, greedily. Raises ValueError where a request failed or stopped."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # Stock's pool takes most of the memory there is, which a CPU's owner wants for other things.
    sized = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256) if model.device.type == "cpu" else None
    given = {"generation_config": config, "continuous_batching_config": sized, "progress_bar": False}
    outputs = list(model.generate_batch(inputs=prompts, **given).values())
    found = [one.generated_tokens for one in outputs if one.error is None]
    if [len(one) for one in found] != [new] * len(prompts):
        errors = [one.error for one in outputs if one.error is not None]
        raise ValueError(f"answers of {[len(one) for one in found]} tokens instead of {new}; {errors[:1]}")
    return found


def device_map(model: "PreTrainedModel", cards: int) -> dict[str, int]:
    """By path the number of the card, equally many layers on each; a tied head is on the embeddings' card."""
    from accel.llm.recording.recorder import decoder_layers

    stack, layers = decoder_layers(model)
    found: dict[str, int] = {}
    head = model.get_output_embeddings()
    tied = head.weight is model.get_input_embeddings().weight

    def visit(prefix: str, module: object) -> None:
        for name, child in module.named_children():  # type: ignore[attr-defined]
            path = f"{prefix}{name}"
            if path == stack:
                found.update({f"{path}.{number}": number * cards // len(layers) for number in range(len(layers))})
            elif stack.startswith(f"{path}."):
                visit(f"{path}.", child)
            else:
                behind = f"{stack}.0" in found
                found[path] = cards - 1 if behind and not (child is head and tied) else 0

    visit("", model)
    return found


def spread(model: "PreTrainedModel", cards: int) -> "PreTrainedModel":
    """The model itself, moved to so many cards, with accelerate's hooks, as `device_map` has it."""
    from accelerate import dispatch_model

    return dispatch_model(model, device_map(model, cards), main_device=0, force_hooks=True)
