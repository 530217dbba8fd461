"""Encoder-decoder models of transformers: which they are, their cache, and the names their forwards share."""

from typing import Any

from transformers import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from accel.libraries.cache import DynamicCache, DynamicLayer
from accel.libraries.models import is_model

TOKENS, POSITIONS, MASK = "decoder_input_ids", "decoder_position_ids", "decoder_attention_mask"
ENCODED, ENCODER_MASK = "encoder_outputs", "attention_mask"
KEPT = ("hidden_states", "attentions")  # of what the encoder gave: fields that an output hands on under other names


def is_seq2seq(obj: Any) -> bool:
    """Whether obj writes a text by a decoder that looks at what an encoder gave."""
    return is_model(obj) and getattr(obj.config, "is_encoder_decoder", False) and obj.can_generate()


def encoded(hidden: Any) -> BaseModelOutput:
    """What an encoder gives."""
    return BaseModelOutput(last_hidden_state=hidden)


def pair_of(own: list[Any], cross: list[Any]) -> EncoderDecoderCache:
    """The cache of these layers, of which the second ones are filled."""
    caches = DynamicCache(), DynamicCache()
    caches[0].layers, caches[1].layers = own, cross
    pair = EncoderDecoderCache(*caches)
    pair.is_updated = dict.fromkeys(range(len(cross)), True)
    return pair


def layers_of(cache: Any) -> tuple[list[Any], list[Any]] | None:
    """Those of a cache that hold something: of the decoder's own tokens, and of the encoder's. None for one of another
    kind, or whose layers do not all hold both.
    """
    if type(cache) is not EncoderDecoderCache:
        return None
    parts = cache.self_attention_cache, cache.cross_attention_cache
    if any(type(part) is not DynamicCache or part.offloading for part in parts):
        return None
    own, cross = ([layer for layer in part.layers if layer.is_initialized] for part in parts)
    if not own or len(own) != len(cross) or not all(map(cache.is_updated.get, range(len(own)))):
        return None
    first = all(part.layers[: len(own)] == found for part, found in zip(parts, (own, cross), strict=True))
    return (own, cross) if first and all(isinstance(layer, DynamicLayer) for layer in (*own, *cross)) else None


def is_empty(cache: Any) -> bool:
    """Whether a forward that is given this begins a text."""
    return cache is None or (type(cache) is EncoderDecoderCache and cache.get_seq_length() == 0)


def output_of(kind: type, logits: Any, cache: Any, field: str, encoder: Any) -> Any:
    """What a step returns. field: of the cache; encoder: what the encoder gave."""
    kept = {f"encoder_{name}": encoder.get(name) for name in KEPT}
    return kind(logits=logits, **{field: cache}, encoder_last_hidden_state=encoder.last_hidden_state, **kept)
