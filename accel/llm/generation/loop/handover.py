"""Where stock's loop hands over to ours: after the first token it has chosen, or not at all.

generate() looks its decoding method up in the class, so that `_sample` itself cannot be another for one model. But
between two steps it asks three methods of the model, and its tokens are in a tensor that it has just made and shows to
the stopping criteria. So stock's own `_sample` reads the prompt, chooses the first token, and comes to the head of its
loop; `_has_unfinished_sequences` then runs the loop of ours, puts all tokens into that very tensor, and says that
nothing is left to be done. Stock ends as ever: with `streamer.end()` and what it returns. `returns_what_criteria_saw`
tries that this is so with the transformers at hand.
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
    """Whether all a call asks for is tokens, and each step follows from the one before. kwargs: of the model."""
    returned = config.return_dict_in_generate and (config.output_scores or config.output_logits)
    others = (value for name, value in kwargs.items() if name not in STEP and name not in NAMES)
    said = any(value is not None and value is not False for value in others)
    return not (said or returned or config.output_attentions or config.output_hidden_states or config.is_assistant)


class Handover:
    """Of one generate() call: `note` is told every token that stock chooses, `run` does the rest where it can."""

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
        """Puts all tokens to come into the tensor that was noted; False where there is none, or no longer a way."""
        ids, store, self.ids = self.ids, self.known_store(), None
        if ids is None or store is None or self.unfinished is None or not self.ready(ids):  # a streamer was there since
            return False
        # A tensor of its own over the same tokens: the noted one is about to be another.
        known = ids.view_as(ids)
        loop = TokenLoop(self.forward, store, self.request, self.criteria, known, self.unfinished, self.prompt)
        ids.set_(loop.run())  # type: ignore[call-overload]
        return True
