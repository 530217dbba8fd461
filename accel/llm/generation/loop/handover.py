"""Where stock's token loop hands over to `TokenLoop`: after the first token, or not at all.

generate() looks its decoding method up in the class, so `_sample` cannot be replaced for one model. But between two
steps it calls methods of the model, and shows its tensor of tokens to the stopping criteria. So stock's `_sample` reads
the prompt and chooses the first token. `_has_unfinished_sequences` then runs `TokenLoop`, puts all tokens into that
tensor, and reports that no row is unfinished. Stock ends with `streamer.end()` and returns the tensor.
`returns_what_criteria_saw` checks that with the installed transformers.
"""

import weakref
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteriaList

from accel.libraries.cache import NAMES
from accel.libraries.generation import STEP, late_loop, returns_what_criteria_saw
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.loop.choice import draws_as_torch, pure
from accel.llm.generation.loop.token_loop import GenerateRequest, TokenLoop, undisturbed
from accel.llm.kv_cache.store import Store

DEVICES = ("cuda",)  # where the loop runs; nowhere, if this is empty


def followed(config: GenerationConfig, kwargs: dict[str, Any]) -> bool:
    """Whether a call asks for tokens alone, so that each step follows from the one before. kwargs: of the model."""
    returned = config.return_dict_in_generate and (config.output_scores or config.output_logits)
    others = (value for name, value in kwargs.items() if name not in STEP and name not in NAMES)
    said = any(value is not None and value is not False for value in others)
    return not (said or returned or config.output_attentions or config.output_hidden_states or config.is_assistant)


class Handover:
    """Of one generate() call: `note` follows the tokens that stock chooses, `run` generates the others where it can."""

    def __init__(self, forward: DecoderForward, store: Store, request: GenerateRequest, criteria: StoppingCriteriaList):
        self.forward, self.known_store, self.request, self.criteria = forward, weakref.ref(store), request, criteria
        self.ids: torch.Tensor | None = None  # stock's own, (rows, so far), while the loop may take over
        self.unfinished: torch.Tensor | None = None
        self.prompt = 0

    def ready(self, ids: torch.Tensor) -> bool:
        """Whether the loop can go on behind these tokens, (rows, so far), of which all but the last are stored."""
        store = self.known_store()
        if store is None or store.latest is None or not store.whole or not store.length:
            return False
        device = store.shapes[0].device
        if device.type not in DEVICES or ids.device != device or ids.shape[0] != store.rows:
            return False
        if device.type == "cuda" and (self.forward.runner is None or torch.cuda.is_current_stream_capturing()):
            return False
        if not (pure(self.request.processors) and undisturbed(self.forward)):
            return False
        if late_loop(device, self.request.kwargs):  # it would end the stream with the wrong token
            return False
        if not returns_what_criteria_saw():
            return False
        return not self.request.config.do_sample or draws_as_torch(device)

    def note(self, ids: torch.Tensor, ended: torch.Tensor, ready: bool) -> None:
        """ids: the tokens so far, in stock's own tensor; ended: (rows,) bool, what the criteria said of them."""
        if self.unfinished is None:
            self.prompt = ids.shape[1] - 1
            self.unfinished = torch.ones(ids.shape[0], dtype=torch.long, device=ids.device)
        self.unfinished = self.unfinished & ~ended
        self.ids = ids if ready else None

    def run(self) -> bool:
        """Generates all further tokens into the tensor that was noted. False where that cannot be done any more."""
        ids, store, self.ids = self.ids, self.known_store(), None
        if (
            ids is None or store is None or self.unfinished is None or not self.ready(ids)
        ):  # a streamer may have changed something since
            return False
        # A second tensor over the same memory: `set_` below changes the noted one.
        known = ids.view_as(ids)
        loop = TokenLoop(self.forward, store, self.request, self.criteria, known, self.unfinished, self.prompt)
        ids.set_(loop.run())  # type: ignore[call-overload]
        return True
