"""The ways of calling `generate`, as a table: functions of (model, ids, mask) that give tensors by name.

Tests run each with stock and with ours and compare what comes back.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import WatermarkingConfig

from support.llm import calls
from support.llm.calls import LOGITS
from support.llm.miniatures.family import VOCAB
from support.llm.outputs import generate


@dataclass(frozen=True)
class Mode:
    """call: keywords of generate, or a function of (model, ids, mask) that gives what is to be compared.

    lengths: of the prompts in the batch; shorter ones are padded on the left. share: of so many families one runs it.
    """

    name: str
    call: Callable | dict = field(default_factory=dict)
    lengths: tuple[int, ...] = (9,)
    share: int = 30

    def __str__(self) -> str:
        return self.name

    def __call__(self, model, ids: torch.Tensor, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
        if callable(self.call):
            return self.call(model, ids, mask)
        return generate(model, ids, mask, **self.call)


PAIR = (9, 5)
ENDS = {"eos_token_id": list(range(3, VOCAB, 5)), "max_new_tokens": 14}
SAMPLED = {"do_sample": True}

MODES = (
    Mode("greedy", LOGITS, share=4),
    Mode("greedy-padded", LOGITS, PAIR, share=1),
    Mode("greedy-rows", LOGITS, (7, 7, 7)),
    Mode("greedy-bare", lambda model, ids, mask: generate(model, ids, None)),
    Mode("greedy-ends", ENDS | LOGITS, (9, 4, 6)),
    Mode("greedy-long", {"max_new_tokens": 40}, (6, 9)),
    Mode("one-word", {}, (1,)),
    Mode("no-prompt", lambda model, ids, mask: generate(model, None, None, max_new_tokens=5)),
    Mode("one-new-word", {"max_new_tokens": 1} | LOGITS, PAIR),
    Mode("max-length", {"max_length": 15, "min_length": 12} | ENDS | {"max_new_tokens": None}, PAIR),
    Mode("sample", SAMPLED | LOGITS, PAIR),
    Mode("sample-top", SAMPLED | {"top_k": 12, "top_p": 0.9, "temperature": 0.7, "repetition_penalty": 1.3}, PAIR),
    Mode("sample-cut", SAMPLED | {"min_p": 0.05, "typical_p": 0.9, "epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3}),
    Mode("sample-several", SAMPLED | {"num_return_sequences": 3}, PAIR),
    Mode("processors", {
        "no_repeat_ngram_size": 2, "bad_words_ids": [[5], [6, 7], [76]], "suppress_tokens": [8, 9, 43],
        "begin_suppress_tokens": [64], "sequence_bias": [[[10], 1.5], [[11, 12], -3.0]], "min_new_tokens": 4,
        "exponential_decay_length_penalty": (3, 1.2), "forced_eos_token_id": 2, "remove_invalid_values": True,
        "renormalize_logits": True} | ENDS | LOGITS, PAIR),
    Mode("processors-more", {
        "encoder_repetition_penalty": 1.4, "encoder_no_repeat_ngram_size": 2, "forced_bos_token_id": 7,
        "watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash")} | LOGITS,
        PAIR),
    Mode("sample-top-h", SAMPLED | {"top_h": 0.4}, PAIR),
    Mode("own-processor", calls.own_processor, PAIR),
    Mode("own-criterion", calls.own_criterion, PAIR),
    Mode("guided", calls.guided),
    Mode("constrained", calls.constrained, PAIR),
    Mode("constrained-beam", functools.partial(calls.constrained, num_beams=3), PAIR),
    Mode("beam", {"num_beams": 4, "num_return_sequences": 2} | LOGITS, PAIR, share=4),
    Mode("beam-ends", {"num_beams": 3, "early_stopping": True, "length_penalty": 0.6} | ENDS, PAIR),
    Mode("beam-one-row", {"num_beams": 2}),
    Mode("beam-sample", SAMPLED | {"num_beams": 3, "top_k": 20}, PAIR),
    Mode("assisted", calls.assistant, share=4),
    Mode("assisted-by-its-like", functools.partial(calls.assistant, noise=0.1, **LOGITS)),
    Mode("assisted-by-itself", functools.partial(calls.assistant, noise=0.0)),
    Mode("assisted-sample", functools.partial(calls.assistant, noise=0.1, **SAMPLED)),
    Mode("early-exit", calls.early_exit),
    Mode("prompt-lookup", calls.looked_up, (5,)),
    Mode("prompt-lookup-sample", functools.partial(calls.looked_up, **SAMPLED), (5,)),
    Mode("hidden-states", {"output_hidden_states": True, "return_dict_in_generate": True, "max_new_tokens": 3}, PAIR),
    Mode("attentions", calls.attentions, PAIR),
    Mode("static", {"cache_implementation": "static", "disable_compile": True}, PAIR),
    Mode("static-object", calls.static_object),
    Mode("dynamic-by-name", {"cache_implementation": "dynamic"}, PAIR),
    Mode("no-cache", {"use_cache": False} | LOGITS, PAIR),
    Mode("no-cache-beam", {"use_cache": False, "num_beams": 2}),
    Mode("embeddings", calls.embedded, PAIR),
    Mode("embeddings-and-ids", functools.partial(calls.embedded, with_ids=True)),
    Mode("chunked-prefill", {"prefill_chunk_size": 4}, (11,)),
    Mode("chunked-prefill-padded", {"prefill_chunk_size": 3}, (11, 6)),
    Mode("given-cache", calls.given_cache),
    Mode("given-cache-padded", calls.given_cache, PAIR),
    Mode("given-cache-plain", functools.partial(calls.given_cache, plain=True)),
    Mode("continued", calls.continued),
    Mode("continued-padded", calls.continued, PAIR),
    Mode("continued-sample", functools.partial(calls.continued, **SAMPLED), PAIR),
    Mode("prefilled", calls.prefilled),
    Mode("prefilled-rows", calls.prefilled, (7, 7)),
    Mode("fanned-out", calls.fanned_out),
    Mode("cropped", calls.cropped),
    Mode("streamer", calls.streamed),
    Mode("stop-strings", calls.stopped, PAIR),
    Mode("max-time", calls.timed),
    Mode("positions", calls.explicit_positions, PAIR),
    Mode("own-loop", calls.own_loop, PAIR),
    Mode("generation-config", calls.in_a_config, PAIR),
    Mode("padded-right", calls.padded_right, PAIR),
    Mode("inference-mode", torch.inference_mode()(lambda model, ids, mask: generate(model, ids, mask, **LOGITS)), PAIR),
)  # fmt: skip
