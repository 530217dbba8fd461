"""The forward of a model of which some layers are understood: stock code, in which those layers run fused.

Stock layers stand between them and keep what they keep, such as a recurrent state, in their own layers of the caller's
cache. The model's Python sees that cache, with its lengths, so no CUDA graph holds for the next step.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from accel.cuda_graphs.fingerprint import Fingerprint
from accel.errors import reason_of
from accel.libraries.cache import DynamicCache
from accel.llm.generation.calling_convention import CallingConvention, Unfit, tokens_of
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.teacher_forcing import differing_part
from accel.llm.generation.trial import (
    PADDING,
    expected,
    fused_layers,
    logits_over_pieces,
    pieces_of,
    plainly,
    stock_logits,
    trial_lengths,
)
from accel.llm.kv_cache.cache import STOCK, adopt
from accel.llm.kv_cache.store import Store
from accel.llm.recording.record import NotUnderstood
from accel.llm.recording.recorder import ROWS, resting
from accel.quantization.module import unrounded


class MixedForward(DecoderForward):
    """Runs calls with a cache; `layers` by their `LayerForward`, all others as they are."""

    convention = CallingConvention(dict, False, None)  # what else there is to one is stock's

    def fast(self, *args: Any, **kwargs: Any) -> Any:
        kwargs, cache = self.taken_apart(args, kwargs)
        use_cache, _ = self._wanted(kwargs)
        tokens = tokens_of(kwargs, self.embeddings().shape[1], self.shapes()[0].dtype)
        if not use_cache:
            raise Unfit("no cache")
        if cache is None:
            cache = DynamicCache(config=self.module.config)
        rows, new = tokens.shape[:2]
        unknown = self.convention.unknown(kwargs, rows, 0, new)
        if unknown is not None and (reason := self.stays_stock(kwargs, unknown)) is not None:
            raise Unfit(reason)
        self.ready()  # before the cache is taken over: stock wants it as it is
        store = self.adopt(cache)
        if tokens.device != store.shapes[0].device or (store.length and rows != store.rows):
            raise Unfit("inputs on another device, or of another number of rows, than the cache")
        return self.by_own_code(store, cache, tokens, kwargs, checked=unknown is not None)

    def adopt(self, cache: Any) -> Store:
        """The store under the cache's layers of the fused ones, put there if need be; the others stay. Raises Unfit."""
        places = self.places()
        if type(cache) is not DynamicCache or cache.offloading or len(cache.layers) <= places[-1]:
            raise Unfit(f"a cache of another kind: {type(cache).__name__}")
        mine = DynamicCache()
        mine.layers = [cache.layers[place] for place in places]
        if cache.get_seq_length() != mine.get_seq_length():
            raise Unfit("cache layers of different lengths")
        store = adopt(mine, self.shapes())
        if isinstance(store, str):
            raise Unfit(store)
        for place, layer in zip(places, mine.layers, strict=True):
            cache.layers[place] = layer
        return store

    def ready(self, stack: bool = True) -> None:
        """As of all layers, but looks at those alone that are fused: of the others nothing is taken for granted."""
        if len(self._stack()) != len(self.layers):
            self.seen = None
        super().ready(stack)

    def _fingerprint(self) -> Fingerprint:
        return Fingerprint(nn.ModuleList(self._stack()), beside=self.model_guard)

    def write(self, pieces: Iterable[dict]) -> torch.Tensor:
        """The logits of pieces of a text, one after another."""
        return logits_over_pieces(self, self.fast, pieces)

    def _stack(self) -> list[nn.Module]:
        mine = {id(layer.module) for layer in self.layers}
        return [module for module in self.module.get_submodule(self.stack) if id(module) in mine]


def try_mixed(forward: MixedForward) -> None:
    """Compares it with stock: a padded prompt and steps, and without a mask. Raises NotUnderstood."""
    model = forward.module
    known = set(forward.places())
    layers = DynamicCache(config=model.config).layers
    for place, layer in enumerate(layers):
        if place in known and type(layer) not in STOCK:
            raise NotUnderstood(f"layer {place} keeps more than keys and values")
        if place not in known and type(layer) is STOCK[1]:
            raise NotUnderstood(f"layer {place} is not understood, and drops what its window has passed")
    if any(layer.spec.attention.has_position_bias for layer in forward.layers):
        raise NotUnderstood("biases by distance, and not all layers are understood")
    lengths = trial_lengths(forward)
    forward.apart = True
    try:
        with resting(model), unrounded(model):
            wanted, _ = stock_logits(forward, lengths)
            bare = expected(forward, partial(_plain_logits, forward, lengths))
            fused = partial(_masked_logits, forward, lengths)
            with fused_layers(forward):
                with wanted.routed():
                    got = fused()
                with bare.routed():
                    plain = _logits(forward.fast, forward, lengths)
                if wanted.logits.is_cuda:  # what one row launches is compiled now, and not in a user's call
                    _logits(forward.fast, forward, lengths, rows=1)
                agrees = wanted.agrees(got) and bare.agrees(plain)
                apart = differing_part(forward, lengths, fused) if agrees and not wanted.near(got) else None
    except NotUnderstood:
        raise
    except Exception as error:  # whatever a forward may raise
        raise NotUnderstood(f"could not be tried: {reason_of(error)}") from error
    finally:
        forward.apart, forward.seen = False, None
    if not agrees or apart is not None:
        whole = "the whole model computes something else than its parts"
        raise NotUnderstood(": ".join(filter(None, (whole, apart))))


def _masked_logits(forward: MixedForward, lengths: tuple) -> torch.Tensor:
    """Of all pieces but the padding's."""
    return _logits(forward.fast, forward, lengths, masked=True)[:, PADDING:]


def _plain_logits(forward: MixedForward, lengths: tuple) -> torch.Tensor:
    """Stock's, without a mask."""
    with plainly(forward):
        return _logits(forward.reference, forward, lengths)


def _logits(
    call: Callable, forward: MixedForward, lengths: tuple, masked: bool = False, rows: int = ROWS
) -> torch.Tensor:
    """Of all pieces, one after another; with a mask and positions, or of so many rows without."""
    pieces = pieces_of(forward, lengths)
    bare = ({"input_ids": piece["input_ids"][:rows]} for piece in pieces)
    return logits_over_pieces(forward, call, pieces if masked else bare)
