"""The loop of tokens over the fixed memory, for encoder-decoder models: stock's own begins a text, this goes on."""

from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from accel.libraries.cache import ENCODED, MASK, empty_layers, filled_layers, generating_cache
from accel.libraries.generation import AS_IMPORTED, LOOP, PREPARE, UPDATE, loop_that_asks
from accel.llm.generation.loop.choice import draws_as_torch
from accel.llm.generation.loop.token_loop import GenerateRequest, Token, TokenLoop
from accel.offload.call_hooks import streamed_model
from accel.seq2seq.decoder import Seq2SeqForward
from accel.seq2seq.late_check import ModelView
from accel.seq2seq.step_forward import Choice, likeliest

ONE_BY_ONE = "decoder_position_ids"  # of a loop that counts a text's positions by itself


class NoCheck:
    """Made and called by stock's loop, as its own check: one token is wanted, whatever it is."""

    def __init__(self, *_: Any): ...

    @staticmethod
    def is_supported(*_: Any, **__: Any) -> bool:
        return True

    def __call__(self, *_: Any) -> bool:
        return False

    def finish(self) -> int:
        return 0


FIRST_LOOP = loop_that_asks(NoCheck) or AS_IMPORTED[LOOP]


class FirstToken(ModelView):
    """A model as stock's loop sees it, which ends when it has chosen one token. kwargs: of the step behind that; dtype:
    of its logits.
    """

    kwargs: dict[str, Any]
    dtype: torch.dtype
    asked = False

    def _has_unfinished_sequences(self, *_: Any, **__: Any) -> bool:
        before, self.asked = self.asked, True
        return not before

    def _update_model_kwargs_for_generation(self, outputs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.dtype = outputs.logits.dtype
        self.kwargs = getattr(self.model, UPDATE)(outputs, *args, **kwargs)
        return self.kwargs


class MemoryLoop(TokenLoop):
    """cache: of the call, which is in the fixed memory as long as no other text takes its place."""

    def __init__(
        self,
        forward: Seq2SeqForward,
        cache: Any,
        request: GenerateRequest,
        criteria: StoppingCriteriaList,
        ids: torch.Tensor,
        unfinished: torch.Tensor,
    ) -> None:
        super().__init__(request, criteria, ids, unfinished, cache.get_seq_length())
        self.forward, self.cache, self.fused = forward, cache, True

    def length(self) -> int:
        return self.cache.get_seq_length()

    def logits(self, token: Token) -> torch.Tensor:
        found = self.forward.continued(self.cache, token.last) if self.fused else None
        if found is not None:
            return found
        model = self.forward.module
        inputs = getattr(model, PREPARE)(token.ids, next_sequence_length=1, **self.request.kwargs)
        return model(**inputs, return_dict=True).logits

    def choose(self, token: Token) -> tuple[torch.Tensor, torch.Tensor | None]:
        """In the graph of the step, where nothing of the host's is between its scores and the token."""
        if self.fused and self.late and not (self.random or self.request.processors or self.by_tokens):
            choice = Choice(likeliest, (token.unfinished, self.eos, self.pad))
            found = self.forward.continued(self.cache, token.last, choice)
            if found is not None:
                return found, None
        return super().choose(token)

    def call_the_model(self) -> None:
        super().call_the_model()
        self.fused = False

    def look(self) -> None:
        self.fused = False

    def crop(self) -> None:
        self.forward.go_back(self.cache, self.stored)


def follows(model: Any, config: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the call asks for tokens alone, and a step differs from the one before in its token alone."""
    cache, hidden = generating_cache(kwargs), getattr(kwargs.get(ENCODED), "last_hidden_state", None)
    other = empty_layers(cache) is None and filled_layers(cache) is None
    if hidden is None or not kwargs.get("use_cache") or other or any(cache.is_sliding):
        return False
    returned = config.return_dict_in_generate or config.output_attentions or config.output_hidden_states
    told = kwargs.get(MASK) is not None or kwargs.get(ONE_BY_ONE) is not None
    drawn = not config.do_sample or draws_as_torch(hidden.device)
    return drawn and not (returned or told or config.is_assistant or streamed_model(model) is not None)


def tokens_late(
    forward: Seq2SeqForward,
    model: Any,
    input_ids: torch.Tensor,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """(rows, tokens), what stock's loop gives, of a call that `follows`."""
    view, call = FirstToken(model), {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
    ids = FIRST_LOOP(view, input_ids, generation_config=generation_config, **call, **kwargs)
    unfinished, cache = (~stopping_criteria(ids, None)).long(), generating_cache(view.kwargs)
    longest, request = stopping_criteria.max_length, GenerateRequest(generation_config, view.kwargs, logits_processor)
    if (longest is not None and ids.shape[1] >= longest) or not bool(unfinished.any()):
        return ids
    return MemoryLoop(forward, cache, request, stopping_criteria, ids, unfinished).run()
