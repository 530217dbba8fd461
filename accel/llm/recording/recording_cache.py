"""A cache that shows what the layers of a recorded run put into it."""

from typing import Any

import torch
from transformers import PretrainedConfig

from accel.libraries.cache import DynamicCache


class RecordingCache(DynamicCache):
    """An ordinary cache that shows what is stored."""

    def __init__(self, recorder: Any, config: PretrainedConfig):
        super().__init__(config=config)
        self.recorder = recorder

    def get_seq_length(self, *args: Any, **kwargs: Any) -> Any:
        return self.recorder.length_shown(super().get_seq_length(*args, **kwargs))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        self.recorder.stored(key_states, value_states, layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

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
