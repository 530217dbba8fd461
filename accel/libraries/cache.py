"""The cache of transformers: its classes, the argument a forward takes it by, and the field of an output that holds it.

transformers 5.24 renamed `past_key_values` (and `cache_params`) to `cache`. So the argument is the one annotated as a
cache, the field the one that holds one; names are asked only where nothing is annotated. Encoder-decoder models have a
pair of caches, and share the names of what else their forwards are given.
"""

import inspect
import typing
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)
from transformers.modeling_outputs import BaseModelOutput

from accel.libraries.code import comes_from

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "Cache",
    "DynamicCache",
    "DynamicIndexedLayer",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionLayer",
]

# Where a model's own class of caches keeps states, one a layer beside its layers, and the method that puts them there.
STATES, SET_STATE = "linear_cache", "set_linear_cache"
NAMES = ("cache", "past_key_values", "cache_params")  # of arguments and fields, the newest first
SOUGHT = f"no parameter is annotated as one, or named {', '.join(NAMES[:-1])} or {NAMES[-1]}"
# Of encoder-decoder models.
TOKENS, POSITIONS, MASK = "decoder_input_ids", "decoder_position_ids", "decoder_attention_mask"
ENCODED, ENCODER_MASK = "encoder_outputs", "attention_mask"
MASK_BESIDE = "attention_mask"  # a field of what some encoders give
MASK_OF_FRAMES = "_get_feature_vector_attention_mask"  # a method: the mask of an encoder's tokens, by one of frames
LENGTHS_OF_FRAMES = "_compute_sub_sample_lengths_from_attention_mask"  # a method: how many of such tokens each row has
KEPT = ("hidden_states", "attentions")  # of what the encoder gave: fields that an output hands on under other names


@lru_cache(maxsize=1024)
def cache_argument(forward: Callable) -> str | None:
    """The name of the parameter by which a forward takes the cache of a text; None where it takes none."""
    parameters = inspect.signature(forward).parameters
    annotated = [name for name, one in parameters.items() if _is_cache(one.annotation)]
    return next((name for name in (*annotated, *NAMES) if name in parameters), None)


@lru_cache(maxsize=1024)
def renamed_arguments(forward: Callable) -> dict[str, str]:
    """Old names by which a forward still takes arguments, with the present ones, from the decorator's closure."""
    found: dict[str, str] = {}
    while (inner := getattr(forward, "__wrapped__", None)) is not None:
        names = inspect.getclosurevars(forward).nonlocals if inspect.isfunction(forward) else {}
        old, new = names.get("old_name"), names.get("new_name")
        if isinstance(old, str) and isinstance(new, str):
            found[old] = new
        forward = inner
    return found


def with_present_names(forward: Callable, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call under the names that a forward has for them now; what is given by both counts once."""
    renamed = renamed_arguments(forward)
    if not renamed.keys() & kwargs.keys():
        return kwargs
    present = {name: value for name, value in kwargs.items() if name not in renamed}
    return {renamed[name]: kwargs[name] for name in renamed if name in kwargs} | present


def cache_given(forward: Callable, cache: object) -> dict[str, Any]:
    """The keyword by which a forward is given this cache."""
    name = cache_argument(forward)
    return {} if name is None else {name: cache}


def generating_cache(model_kwargs: dict[str, Any]) -> Any:
    """The cache among the arguments that generate() goes on with; None where there is none."""
    return next((model_kwargs[name] for name in NAMES if model_kwargs.get(name) is not None), None)


def cache_of(output: Any) -> Any:
    """The cache in what a forward returned, which may be a tuple; None where it has none."""
    values = output if isinstance(output, tuple) else output.values()
    return next((value for value in values if isinstance(value, Cache)), None)


@lru_cache(maxsize=256)
def cache_field(output: type) -> str:
    """The field of this class of outputs that holds a cache."""
    named = {one.name: one.type for one in fields(output)}
    annotated = [name for name, kind in named.items() if _is_cache(kind)]
    return next((name for name in (*annotated, *NAMES) if name in named), NAMES[0])


def own_cache(model: "PreTrainedModel") -> type[DynamicCache] | None:
    """The class of caches, which keep `STATES`, that the stack of layers of a model insists on; None for any."""
    return _own_cache(type(model.base_model).forward)


@lru_cache(maxsize=256)
def _own_cache(forward: Callable) -> type[DynamicCache] | None:
    given = inspect.signature(forward).parameters.get(cache_argument(forward) or "")
    kinds = () if given is None else (given.annotation, *typing.get_args(given.annotation))
    return next((kind for kind in kinds if keeps_states_beside(kind)), None)


def keeps_states_beside(kind: object) -> bool:
    """Whether it is a class of the library's caches that keep states beside their layers."""
    theirs = isinstance(kind, type) and issubclass(kind, DynamicCache) and comes_from(kind, "transformers")
    return theirs and hasattr(kind, SET_STATE)


def new_cache(model: "PreTrainedModel") -> DynamicCache:
    """An empty one, as generate() or the model itself makes it."""
    own = own_cache(model)
    return DynamicCache(config=model.config) if own is None else own()


def _is_cache(annotation: object) -> bool:
    if isinstance(annotation, str):
        words = annotation.replace("|", " ").replace("[", " ").replace("]", " ").replace(",", " ").split()
        return any(word.rpartition(".")[2].endswith("Cache") for word in words)
    kinds = (annotation, *typing.get_args(annotation))
    return any(isinstance(kind, type) and issubclass(kind, Cache) for kind in kinds)


class Encoded(BaseModelOutput):
    """What an encoder gives; nothing of what some encoders give beside."""

    attention_mask = router_logits = None


def encoded(hidden: Any, mask: Any = None) -> BaseModelOutput:
    """What an encoder gives. mask: beside it."""
    found = Encoded(last_hidden_state=hidden)
    found.attention_mask = mask
    return found


def pair_of(own: list[Any], cross: list[Any]) -> EncoderDecoderCache:
    """The cache of these layers, of which the second ones are filled."""
    caches = DynamicCache(), DynamicCache()
    caches[0].layers, caches[1].layers = own, cross
    pair = EncoderDecoderCache(*caches)
    pair.is_updated = dict.fromkeys(range(len(cross)), True)
    return pair


def filled_layers(cache: Any) -> tuple[list[Any], list[Any]] | None:
    """A cache's layers that hold something, of the decoder and of the encoder; None unless all hold both."""
    if type(cache) is not EncoderDecoderCache:
        return None
    parts = cache.self_attention_cache, cache.cross_attention_cache
    if any(type(part) is not DynamicCache or part.offloading for part in parts):
        return None
    own, cross = ([layer for layer in part.layers if layer.is_initialized] for part in parts)
    if not own or len(own) != len(cross) or not all(map(cache.is_updated.get, range(len(own)))):
        return None
    first = all(part.layers[: len(own)] == found for part, found in zip(parts, (own, cross), strict=True))
    return (own, cross) if first else None


def empty_pair(config: Any) -> EncoderDecoderCache:
    """The cache of a text of such a decoder that has not begun."""
    return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))


def empty_layers(cache: Any) -> tuple[list[Any], list[Any]] | None:
    """As `filled_layers`, of a cache that holds nothing yet."""
    if type(cache) is not EncoderDecoderCache:
        return None
    parts = cache.self_attention_cache, cache.cross_attention_cache
    plain = all(type(part) is DynamicCache and not part.offloading for part in parts)
    layers = parts[0].layers, parts[1].layers
    new = all(type(layer) is DynamicLayer and not layer.is_initialized for own in layers for layer in own)
    return layers if plain and new and len(layers[0]) == len(layers[1]) > 0 else None


def hold_nothing(layers: list[Any], none: Any) -> None:
    """Has layers hold no tokens instead of nothing. none: keys, or values, of that many."""
    for layer in layers:
        layer.lazy_initialization(none, none)
        layer.keys = layer.values = none


def note_filled(cache: Any) -> None:
    """Has a cache know that all its layers hold what the encoder gave."""
    cache.is_updated.update(dict.fromkeys(range(len(cache.cross_attention_cache.layers)), True))


def is_empty(cache: Any) -> bool:
    """Whether a forward that is given this begins a text."""
    return cache is None or (type(cache) is EncoderDecoderCache and cache.get_seq_length() == 0)


def output_of(kind: type, made: dict[str, Any], cache: Any, field: str, encoder: Any) -> Any:
    """What a step returns. made: by the decoder; field: of the cache; encoder: what the encoder gave."""
    kept = {f"encoder_{name}": encoder.get(name) for name in KEPT}
    return kind(**made, **{field: cache}, encoder_last_hidden_state=encoder.last_hidden_state, **kept)
