"""generate() of transformers: the methods that it calls, the arguments it passes, and its loop."""

import copy
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from types import FunctionType, MappingProxyType, SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMode, utils
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS as FIXED_CACHES
from transformers.generation.logits_process import WhisperNoSpeechDetection

from accel.errors import reason_of
from accel.libraries.cache import generating_cache

__all__ = ["GenerationMode", "WhisperNoSpeechDetection"]

# Methods of a model that generate() calls; LOOP is where it goes on token by token.
MODE_ARGUMENTS, INPUTS = "_extract_generation_mode_kwargs", "_prepare_model_inputs"
POSITIONS = "_prepare_position_ids_for_generation"
CACHE, PROCESSORS, CRITERIA = "_prepare_cache_for_generation", "_get_logits_processor", "_get_stopping_criteria"
LOOP, DECODING, UNFINISHED = "_sample", "_optimize_model_for_decode", "_has_unfinished_sequences"
BEAMS = "_beam_search"  # in place of LOOP
COMPILES = "_can_compile_fullgraph"  # an attribute of a class of models
REORDER = "_reorder_cache"  # of a model that has a way of its own to put its cache in order
# What encodes pictures before the prompt is read, and the argument by which the model is given what came out.
ENCODE, ENCODED = "_maybe_prepare_encoder_kwargs_for_generation", "mm_encoder_outputs"
PREPARE, UPDATE = "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"
LATE_CHECK = "DeferredStopCheck"  # a class that the loop may ask whether all rows have ended; none before 5.24
FALLBACK, SPLIT = "generate_with_fallback", "_postprocess_outputs"  # of Whisper: around generate(), and behind it
SPEECH = "transformers.pipelines.automatic_speech_recognition"  # reads of a segment its tokens and their times alone
PAD_TENSOR = "_pad_token_tensor"  # of a configuration: what generate() puts behind the end of a row

# What says how a step follows from another, beside PREPARE. And methods as they were imported: another function that is
# put there later, for all models, is somebody's own.
STEPS = (LOOP, UPDATE)
AS_IMPORTED: MappingProxyType[str, Any] = MappingProxyType(
    {name: getattr(GenerationMixin, name, None) for name in (PREPARE, POSITIONS, *STEPS, BEAMS, UNFINISHED, DECODING)}
)

# Arguments of a model that generate() and its callers know, besides the cache; of a step, which follow from the step
# before. The tokenizer is for stop strings: generate() hands it to the model as well, which has no use for it.
STEP = {"attention_mask", "position_ids", "use_cache", "logits_to_keep"}
ARGUMENTS = {*STEP, "input_ids", "inputs_embeds", "return_dict", "tokenizer"}
OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")
FOR_OTHER_LOOPS = ("custom_generate", "streamer", "assistant_model", "synced_gpus", "tokenizer", "trust_remote_code")
LABELS = "labels"  # of a loss, in which padding counts like any token
MARKS = ("token_type_ids", "mm_token_type_ids")  # one number a token: 0 for text, 1 for what is not, or for an answer
FRAMES = ("feature_attention_mask",)  # (sounds, frames): which of them are of a sound; generate() tells each step
GRIDS = ("image_grid_thw", "video_grid_thw")  # (images, 3): frames, rows and columns of each


def predictable(model: PreTrainedModel, prepared: Any = None) -> bool:
    """Whether the loop around this model is GenerationMixin's: one token more, one position, one 1 of the mask.

    prepared: a function of its class that prepares inputs alike.
    """
    usual = getattr(type(model), PREPARE, None) in (AS_IMPORTED[PREPARE], prepared)
    return usual and stock_methods(model, *STEPS) and not any(name in vars(model) for name in STEPS)


def stock_methods(model: PreTrainedModel, *names: str) -> bool:
    """Whether the model's class leaves these as GenerationMixin has them."""
    return all(getattr(type(model), name, None) is AS_IMPORTED[name] for name in names)


def processors(model: PreTrainedModel, config: Any, ends: torch.Tensor | None, **given: Any) -> LogitsProcessorList:
    """Those that generate() would have. config: is told the ends, as generate() leaves it."""
    config._eos_token_tensor = ends
    return model._get_logits_processor(config, **given)


def next_inputs(model: PreTrainedModel, kwargs: dict[str, Any], ids: torch.Tensor, new: int) -> dict[str, Any]:
    """The arguments of the step after ids, `new` tokens after the step with kwargs."""
    kwargs = model._update_model_kwargs_for_generation({}, dict(kwargs), num_new_tokens=new)
    return model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs)


def merged_config(model: PreTrainedModel, given: dict[str, Any]) -> GenerationConfig:
    """The configuration of a generate() call with these arguments, as far as it says what kind of call it is."""
    own: Any = copy.copy(model.generation_config)
    for source in (vars(given.get("generation_config") or own), given):
        vars(own).update({name: one for name, one in source.items() if one is not None and hasattr(own, name)})
    return own


def with_growing_cache(model: PreTrainedModel, config: GenerationConfig) -> GenerationConfig | None:
    """The same call with stock's usual cache; None unless it is made with one of fixed size, which nobody gets to see.

    generate() compiles the forward for such a cache, and returns it where a dictionary is asked for. With models of
    which their class does not say that they compile, it may give other tokens.
    """
    asked = config.cache_implementation
    if asked not in FIXED_CACHES or "offloaded" in asked or config.return_dict_in_generate:
        return None
    if not getattr(type(model), COMPILES, False):
        return None
    found = copy.copy(config)
    found.cache_implementation = None
    return found


def decoding_method(model: PreTrainedModel, config: GenerationConfig) -> Callable:
    """The method of its class that generate() would go on with."""
    return getattr(type(model), utils.GENERATION_MODES_MAPPING[config.get_generation_mode()])


def loop_that_asks(check: type) -> Callable | None:
    """Stock's own loop with this class for its `LATE_CHECK`; None in a version whose loop has none."""
    loop: Any = AS_IMPORTED[LOOP]
    if LATE_CHECK not in loop.__code__.co_names:
        return None
    found = FunctionType(
        loop.__code__, loop.__globals__ | {LATE_CHECK: check}, LOOP, loop.__defaults__, loop.__closure__
    )
    found.__kwdefaults__ = loop.__kwdefaults__
    return found


def called_by_speech_pipeline() -> bool:
    """Whether the code that called what accel has put on a model is the library's pipeline for speech."""
    frame: Any = inspect.currentframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("accel."):
        frame = frame.f_back
    return frame.f_globals.get("__name__") == SPEECH


def logits_alone(logits: torch.Tensor) -> Any:
    """What a model gives, as its loop reads it, of which nothing else is to be read."""
    return utils.ModelOutput(logits=logits)


def defers_stop_check(device: torch.device, kwargs: dict[str, Any]) -> bool:
    """Whether stock's own loop defers its stop check by a token on this device."""
    check = getattr(utils, "DeferredStopCheck", None)
    try:
        return check is not None and check.is_supported(device, generating_cache(kwargs), False, False)
    except TypeError:  # asked otherwise in another version
        return True


class _PromptOnly:
    """Stands for a model in `_sample`, which reads a prompt and makes no step."""

    config = SimpleNamespace(is_encoder_decoder=False)

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.asked = 0
        self.words = torch.arange(7, device="cpu")[None]

    def _valid_auto_compile_criteria(self, *_: object) -> bool:
        return False

    def __call__(self, *_: object, **__: object) -> None:
        raise RuntimeError("it makes no step")

    def _prefill(self, *_: object, **__: object) -> Any:
        return utils.ModelOutput(logits=torch.eye(4, device="cpu")[None, 2:3])

    def _optimize_model_for_decode(self) -> nullcontext:
        return nullcontext()

    def _update_model_kwargs_for_generation(self, outputs: object, kwargs: dict, **_: object) -> dict:
        return kwargs

    def _has_unfinished_sequences(self, *_: object, **__: object) -> bool:
        self.asked += 1
        if self.asked > 1:
            self.seen[-1].set_(self.words.clone())  # type: ignore[call-overload]
        return self.asked == 1

    def criterion(self, ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.seen.append(ids)
        return torch.zeros(len(ids), dtype=torch.bool, device="cpu")


@cache
def returns_what_criteria_saw() -> bool:
    """Whether stock's loop, if ended after the prompt, returns the tensor that it gave the criteria; found by trial."""
    model, config = _PromptOnly(), GenerationConfig(do_sample=False, pad_token_id=0)
    setattr(config, PAD_TENSOR, torch.tensor(0, device="cpu"))
    criteria = StoppingCriteriaList([model.criterion])
    try:
        with torch.no_grad():
            found = GenerationMixin._sample(
                model, torch.tensor([[1, 3]], device="cpu"), LogitsProcessorList(), criteria, config, use_cache=True
            )
    except Exception as error:  # a loop of another kind
        reason_of(error)
        return False
    return len(model.seen) == 1 and type(found) is torch.Tensor and torch.equal(found, model.words)
