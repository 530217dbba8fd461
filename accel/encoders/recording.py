"""What the layers of an encoder do, seen once in a small stock run."""

import threading
from contextlib import ExitStack
from typing import Any

import torch
from accel_kernels.attention.math_attention import math_attention
from torch import nn

from accel.encoders.bidirectional_attention import BidirectionalSpec
from accel.errors import reason_of
from accel.llm.recording.implementation import foreign_attention
from accel.llm.recording.inputs import few
from accel.llm.recording.record import LayerRecord, NotUnderstood, Record, Stored
from accel.llm.recording.recorder import NAME, Recorder, decoder_layers, example_ids, resting
from accel.llm.runtime.layer import put_together
from accel.llm.runtime.layer_spec import LayerSpec


class EncoderRecorder(Recorder):
    """Gathers keys and values that layers attend with; there is no cache that they would be stored in."""

    def __init__(self, record: Record):
        self.record, self.scores, self.amplified, self.looking, self.lent = record, False, 1.0, False, {}
        self.open, self.until_shown = [], ExitStack()
        self.thread, self.name = threading.get_ident(), f"{NAME}_{id(self):x}"
        self.specs: list[LayerSpec] = []

    def look(self, layer: LayerRecord, record: Record) -> None:
        found = BidirectionalSpec.understand(layer, record)
        self.specs.append(put_together(layer, [found], None, layer.call.output, []))

    def _mask(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        # A mask that hides nothing of a short text is none, of which two kinds of layers could not be told apart.
        return super()._mask(*args, **kwargs | {"allow_is_bidirectional_skip": False})

    def _attend(self, module: nn.Module, query: Any, key: Any, value: Any, *given: Any, **options: Any) -> tuple:
        result = super()._attend(module, query, key, value, *given, **options)
        if not self._elsewhere():
            if self.current.stored is not None:
                raise NotUnderstood("a layer attends twice")
            self.current.stored = Stored(module, len(self.specs), key.clone(), value.clone())
        return result


def understand_encoder(model: Any) -> tuple[str, nn.ModuleList, list[LayerSpec]]:
    """The path and the layers of an encoder, and what each computes. Raises NotUnderstood."""
    path, layers = decoder_layers(model)
    if (foreign := foreign_attention([model, *layers.modules()])) is not None:
        raise NotUnderstood(foreign)
    kinds: dict = {}
    seen = Record([LayerRecord(layer, f"{path}.{number}", kinds) for number, layer in enumerate(layers)])
    recorder = EncoderRecorder(seen)
    try:
        with resting(model), math_attention(), recorder.attached(model), recorder.until_shown:
            type(model).forward(model, input_ids=example_ids(model, few(model)))
    except NotUnderstood:
        raise
    except Exception as error:  # whatever a forward may raise
        raise NotUnderstood(f"could not be examined: {reason_of(error)}") from error
    if len(recorder.specs) < len(layers):
        raise NotUnderstood("not all of its layers run")
    return path, layers, recorder.specs


def random_mask(ids: torch.Tensor, left: bool = False) -> torch.Tensor:
    """(B, L) int64, like ids, without the last tokens of all rows but the first, or the first ones."""
    shown = torch.ones_like(ids)
    shown[1:, : ids.shape[1] // 2] = 0
    return shown if left else shown.flip(1)
