"""Checks that ranks which share a model generate alike: inputs, decoding, random numbers, outcome."""

from hashlib import blake2b

import torch
from transformers import GenerationConfig, MaxTimeCriteria, StoppingCriteriaList

from accel.errors import Refused
from accel.libraries.generation import GenerationMode
from accel.parallel.agreement import require_agreement
from accel.parallel.ranks import Ranks

PLACE = "generate()"
SEED = "the state of random numbers (call torch.manual_seed with one number on all ranks before)"
DRAWING = ("do_sample", "num_return_sequences", "num_beams", "temperature", "top_k", "top_p")
LENGTHS = ("max_length", "min_length", "eos_token_id", "pad_token_id")


def agree_to_generate(
    ranks: Ranks, inputs: str, mode: GenerationMode, config: GenerationConfig, device: torch.device
) -> None:
    """Raises `errors.Refused` on all ranks where inputs, decoding or random numbers differ, or time is limited."""
    if config.max_time is not None:
        raise _by_a_clock(ranks, config.max_time)
    taken = "" if ranks.paused else ranks.taken  # as all tell it now, whatever comes of it meanwhile
    told = {"the way of decoding": str(mode), "the inputs": inputs, "what computes with these ranks": taken}
    told |= {name: str(getattr(config, name, None)) for name in (*DRAWING, *LENGTHS)}
    if config.do_sample:
        told[SEED] = random_state(device)
    require_agreement(ranks, PLACE, told)
    if taken:
        raise Refused(f"{PLACE}: {taken} computes with all ranks; stop or pause it before, or give it the request")


def agree_on_tokens(ranks: Ranks, sequences: object) -> None:
    """Raises `errors.Refused` on all ranks where they have written different tokens, or one has not ended its call."""
    if isinstance(sequences, torch.Tensor):
        require_agreement(ranks, f"the end of {PLACE}", {"what was written": digest(sequences)})


def refuse_clocks(ranks: Ranks, criteria: StoppingCriteriaList) -> None:
    """Raises `errors.Refused` for a criterion by which each rank would stop at a time of its own."""
    for one in criteria:
        if isinstance(one, MaxTimeCriteria):
            raise _by_a_clock(ranks, one.max_time)


def _by_a_clock(ranks: Ranks, seconds: float) -> Refused:
    return Refused(
        f"{PLACE}: max_time={seconds}: each rank of {ranks.size} would stop at a token of its own; use max_new_tokens"
    )


def random_state(device: torch.device) -> str:
    """Torch's own generator for this device, in short."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()


def digest(inputs: torch.Tensor) -> str:
    """The shape of inputs, and of token numbers what they are. Waits for the device."""
    form = f"{tuple(inputs.shape)} {inputs.dtype}"
    if inputs.is_floating_point():  # embeddings, which ranks may have made with other roundings
        return form
    numbers = inputs.detach().cpu().contiguous().numpy().tobytes()
    return f"{form} {blake2b(numbers, digest_size=8).hexdigest()}"
