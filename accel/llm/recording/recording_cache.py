"""A cache that shows what the layers of a recorded run put into it."""

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from accel.libraries.cache import DynamicCache
from accel.llm.kv_cache.cache import OF_STATES, PAIRS, STOCK


class RecordingCache(DynamicCache):
    """An ordinary cache that shows what is stored."""

    def __init__(self, recorder: Any, config: PretrainedConfig):
        super().__init__(config=config)
        self.recorder = recorder

    def get_seq_length(self, *args: Any, **kwargs: Any) -> Any:
        recorder, length = self.recorder, super().get_seq_length(*args, **kwargs)
        if not recorder.open:
            return length
        recorder.current.shown_length = max(recorder.length, length)
        return recorder.current.shown_length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        self.recorder.stored(key_states, value_states, layer_idx)
        result = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.recorder.lent[layer_idx] = result
        return result

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        self.recorder.kept("inputs", conv_states, layer_idx, state_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        self.recorder.kept("state", recurrent_states, layer_idx, state_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)


def keeps_more(model: PreTrainedModel) -> str | None:
    """What the model's cache keeps besides keys and values or a state a layer, in a reason; None for nothing else."""
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers} - {*STOCK, *OF_STATES, *PAIRS}
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    return f"its cache keeps more than keys and values: {names}" if kinds else None
