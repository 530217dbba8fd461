"""A cache that shows what the layers of a recorded run put into it."""

from functools import lru_cache
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from accel.libraries.cache import SET_STATE, DynamicCache, own_cache
from accel.llm.kv_cache.cache import OF_STATES, PAIRS, STOCK


class RecordingCache(DynamicCache):
    """An ordinary cache that shows what is stored."""

    recorder: Any

    def get_seq_length(self, *args: Any, **kwargs: Any) -> Any:
        recorder, length = self.recorder, super().get_seq_length(*args, **kwargs)
        if not recorder.open:
            return length
        recorder.current.shown_length = max(recorder.length, length)
        return recorder.current.shown_length

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.recorder.stored(key_states, value_states, layer_idx)
        result = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.recorder.lent[layer_idx] = result
        return result

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self.recorder.kept("inputs", conv_states, layer_idx, state_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self.recorder.kept("state", recurrent_states, layer_idx, state_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)


def recording_cache(recorder: Any, model: PreTrainedModel) -> RecordingCache:
    """An empty one, for a model that has this recorder: of the class that it insists on."""
    own: Any = own_cache(model)
    cache = RecordingCache(config=model.config) if own is None else _of_own(own)()
    cache.recorder = recorder
    return cache


@lru_cache(maxsize=64)
def _of_own(kind: Any) -> type[RecordingCache]:
    """A class of caches that keep states beside their layers, which shows those too."""

    def put(self: RecordingCache, layer_idx: int, state: Tensor) -> None:
        self.recorder.kept("state", state, layer_idx, 0)
        getattr(kind, SET_STATE)(self, layer_idx, state)

    return type(RecordingCache.__name__, (RecordingCache, kind), {SET_STATE: put})


def keeps_more(model: PreTrainedModel) -> str | None:
    """What the model's cache keeps besides keys and values or a state a layer, in a reason; None for nothing else."""
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers} - {*STOCK, *OF_STATES, *PAIRS}
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    return f"its cache keeps more than keys and values: {names}" if kinds else None
