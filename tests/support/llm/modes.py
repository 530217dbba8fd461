"""The ways of calling `generate`, as a table: functions of (model, ids, mask) that give tensors by name.

Tests run each with stock and with ours and compare what comes back. What a mode needs besides, it makes anew in every
call and from a fixed seed: assistants, caches and streamers keep state.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import WatermarkingConfig

import accel
from support.llm.families import VOCAB, make, prompt

NEW = 8


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


def generate(model, ids, mask, **call) -> dict[str, torch.Tensor]:
    """Greedily, eight words, unless the keywords say otherwise; the mask may be None, and with no ids bos begins."""
    torch.manual_seed(11)
    if mask is not None:
        call = {"attention_mask": mask} | call
    if not {"max_new_tokens", "max_length"} & call.keys():
        call["max_new_tokens"] = NEW
    return flat(model.generate(input_ids=ids, **{"do_sample": False} | call))


def flat(output, name: str = "") -> dict[str, torch.Tensor]:
    """Every tensor in what generate or a model gave, by its path; of a cache its length."""
    if isinstance(output, torch.Tensor):
        return {name or "sequences": output}
    if hasattr(output, "get_seq_length"):
        return {f"{name}.length": torch.tensor(int(output.get_seq_length()))}
    if hasattr(output, "items"):
        pairs = output.items()
    elif isinstance(output, list | tuple):
        pairs = enumerate(output)
    else:
        return {}
    found = {}
    for key, value in pairs:
        found |= flat(value, f"{name}.{key}" if name else str(key))
    return found


def ran_fast(model) -> None:
    """Every call of it was computed by the fused forward of the whole model.

    Equal text alone does not say so: a kernel that computes something else is found out when the model is optimized,
    which then stays stock, without a single fallback.
    """
    report = accel.report(model)
    whole = [(status, reason) for _, rule, status, reason in report.sites if rule == "language model"]
    assert [status for status, _ in whole] == ["patched"], whole
    assert report.fallbacks == [], report.fallbacks


def same(ours: dict[str, torch.Tensor], stock: dict[str, torch.Tensor], share: float = 1e-5) -> None:
    """Whole numbers are equal, others within `share` of the largest.

    In float32 stock's logits are up to 2e-6 of the largest one from float64's, so ours may be 4e-6 from stock's, and
    scores add logits up.
    """
    assert ours.keys() == stock.keys(), sorted(ours.keys() ^ stock.keys())
    for name, theirs in stock.items():
        mine = ours[name]
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype, (name, mine.shape, theirs.shape)
        if not theirs.is_floating_point():
            assert torch.equal(mine, theirs), f"{name}: {mine.tolist()}, stock {theirs.tolist()}"
            continue
        finite = theirs.isfinite()
        assert torch.equal(mine.isfinite(), finite) and torch.equal(mine[~finite].isnan(), theirs[~finite].isnan()), (
            name
        )
        if finite.any():
            error = float((mine - theirs)[finite].abs().max())
            assert error <= share * float(theirs[finite].abs().max().clamp_min(1e-3)), f"{name}: {error:.1e} apart"


# -- what modes need besides -------------------------------------------------------------------------------------------


@functools.cache
def tokenizer():
    """A character is a token, and a token a character: chr(48) is 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(48 + number): number for number in range(VOCAB)}
    built = Tokenizer(models.WordLevel(vocabulary, unk_token=chr(48)))
    built.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    built.decoder = decoders.Fuse()
    special = {"bos_token": chr(49), "eos_token": chr(50), "pad_token": chr(48), "unk_token": chr(48)}
    made = PreTrainedTokenizerFast(tokenizer_object=built, padding_side="left", **special)
    made.chat_template = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{% endfor %}y"
    return made


def assistant(model, ids, mask, noise: float | None = None, **call) -> dict[str, torch.Tensor]:
    """Assisted by another small model, or by a copy of the model itself with some noise on its weights."""
    if noise is None:
        helper = make("llama-one-layer", seed=5)
        helper.to(model.device, model.dtype)
    else:
        helper = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in helper.parameters():
                own = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.add_(noise * parameter.std(correction=0) * own)
    helper.generation_config.num_assistant_tokens = 3
    return generate(model, ids, mask, assistant_model=helper, **call)


def early_exit(model, ids, mask):
    """Assisted by its own first layer. Stock cuts its configuration short meanwhile, and leaves it so at an error."""
    depth = model.config.num_hidden_layers
    try:
        return generate(model, ids, mask, assistant_early_exit=1)
    finally:
        model.config.num_hidden_layers = depth


class Kept:
    """A streamer that keeps what it was given."""

    def __init__(self):
        self.given, self.ended = [], False

    def put(self, value):
        self.given.append(value.reshape(-1).clone())

    def end(self):
        self.ended = True


def streamed(model, ids, mask):
    streamer = Kept()
    found = generate(model, ids, mask, streamer=streamer)
    assert streamer.ended
    return found | {"streamed": torch.cat(streamer.given), "sizes": torch.tensor([len(x) for x in streamer.given])}


def stopped(model, ids, mask):
    """At strings that are likely to come: any of a quarter of all characters, and a pair that is not."""
    strings = [chr(48 + number) for number in range(3, VOCAB, 4)] + ["zz"]
    return generate(model, ids, mask, stop_strings=strings, tokenizer=tokenizer(), max_new_tokens=12)


def own_criterion(model, ids, mask):
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Even(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return (input_ids[:, -3:] % 2 == 0).all(1)

    return generate(model, ids, mask, stopping_criteria=StoppingCriteriaList([Even()]), max_new_tokens=14)


def own_processor(model, ids, mask):
    from transformers import LogitsProcessor, LogitsProcessorList

    class Against(LogitsProcessor):
        """What came last is as unlikely as can be; changes the scores in place, as some do."""

        def __call__(self, input_ids, scores):
            scores[torch.arange(len(scores)), input_ids[:, -1]] = -float("inf")
            return scores.mul_(1.5)

    return generate(model, ids, mask, logits_processor=LogitsProcessorList([Against()]), **LOGITS)


def constrained(model, ids, mask, **call):
    def allowed(row, given):
        return [(int(given[-1]) * 7 + row + step) % VOCAB for step in range(5)]

    return generate(model, ids, mask, prefix_allowed_tokens_fn=allowed, **call)


def timed(model, ids, mask):
    """Out of time at once, and never."""
    first = generate(model, ids, mask, max_time=0.0)
    return first | {"all": generate(model, ids, mask, max_time=1e6)["sequences"]}


def attentions(model, ids, mask):
    """Only the eager implementation has them: chosen for this call, as users do."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return generate(model, ids, mask, output_attentions=True, return_dict_in_generate=True, max_new_tokens=3)
    finally:
        model.set_attn_implementation(before)


def embedded(model, ids, mask, with_ids: bool = False):
    embeddings = model.get_input_embeddings()(ids).detach()
    return generate(model, ids if with_ids else None, mask, inputs_embeds=embeddings)


def new_cache(model, plain: bool = False):
    from transformers import DynamicCache

    return DynamicCache() if plain else DynamicCache(config=model.config)


def given_cache(model, ids, mask, plain: bool = False):
    cache = new_cache(model, plain)
    found = generate(model, ids, mask, past_key_values=cache)
    return found | {"length": torch.tensor(int(cache.get_seq_length()))}


def static_object(model, ids, mask):
    from transformers import StaticCache

    return generate(model, ids, mask, past_key_values=StaticCache(config=model.config, max_cache_len=24),
                    disable_compile=True)  # fmt: skip


def longer(sequences, mask, seed: int = 4, more: int = 3):
    """A conversation goes on: what was said so far and new words of the user's."""
    ids = torch.cat([sequences, prompt(len(sequences), more, seed).to(sequences)], 1)
    if mask is not None:
        mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], 1)
    return ids, mask


def continued(model, ids, mask, **call):
    """Three turns over one cache."""
    cache, found = None, {}
    for turn in range(3):
        given = {} if cache is None else {"past_key_values": cache}
        torch.manual_seed(turn)
        output = model.generate(
            ids, attention_mask=mask, max_new_tokens=4, return_dict_in_generate=True,
            **{"do_sample": False} | call | given,
        )  # fmt: skip
        cache = output.past_key_values
        found |= {f"{turn}": output.sequences, f"{turn}.length": torch.tensor(int(cache.get_seq_length()))}
        ids, mask = longer(output.sequences, mask, seed=turn)
    return found


def prefilled(model, ids, mask):
    """One cache of a common beginning, copied for each of two prompts, then used up itself."""
    cache = new_cache(model)
    with torch.no_grad():
        model(ids[:, :-2], attention_mask=None if mask is None else mask[:, :-2], past_key_values=cache)
    found = {}
    for number, each in enumerate((copy.deepcopy(cache), copy.deepcopy(cache), cache)):
        given, its_mask = longer(ids[:, : ids.shape[1] - (number == 1)], mask if number != 1 else None, seed=number)
        if number == 1 and mask is not None:
            its_mask = torch.cat([mask[:, :-1], mask.new_ones(len(mask), 3)], 1)
        found[f"{number}"] = generate(model, given, its_mask, past_key_values=each)["sequences"]
    return found


def fanned_out(model, ids, mask):
    """One prompt read once, its cache repeated for several continuations; then some of them dropped."""
    cache = new_cache(model)
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
    cache.batch_repeat_interleave(3)
    many = ids.repeat_interleave(3, 0)
    found = generate(model, many, None, past_key_values=cache, do_sample=True, return_dict_in_generate=True)
    cache.batch_select_indices(torch.tensor([2, 0], device=ids.device))
    rest, _ = longer(found["sequences"][[2, 0]], None)
    return found | {"rest": generate(model, rest, None, past_key_values=cache)["sequences"]}


def cropped(model, ids, mask):
    """A turn taken back: the cache is cut and another question asked."""
    cache = new_cache(model)
    if hasattr(cache, "activate_past_recording"):  # else sliding windows forget what a cut brings back
        cache.activate_past_recording()
    call = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    output = model.generate(ids, past_key_values=cache, **call)
    cache.crop(-4)
    kept = output.sequences[:, : int(cache.get_seq_length())]
    again, _ = longer(kept, None)
    return {"first": output.sequences, "again": generate(model, again, None, past_key_values=cache)["sequences"]}


def explicit_positions(model, ids, mask):
    return generate(model, ids, mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0))


def own_loop(model, ids, mask):
    """generate with a loop of the caller's: stock prepares, and calls it."""

    def loop(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        kwargs.pop("synced_gpus", None), kwargs.pop("streamer", None)
        outputs = []
        for step in range(4):
            inputs = self.prepare_inputs_for_generation(
                input_ids, next_sequence_length=None if step == 0 else 1, is_first_iteration=step == 0, **kwargs
            )
            output = self(**inputs, return_dict=True)
            kwargs = self._update_model_kwargs_for_generation(output, kwargs)
            outputs.append(output.logits[:, -1])
            input_ids = torch.cat([input_ids, outputs[-1].argmax(-1, keepdim=True)], 1)
        return {"ids": input_ids, "logits": torch.stack(outputs)}

    return generate(model, ids, mask, custom_generate=loop)


def guided(model, ids, mask):
    """Classifier-free guidance: the processor calls the model itself, with a cache of its own."""
    return generate(model, ids, mask, guidance_scale=1.7, negative_prompt_ids=prompt(1, 4, 8).to(ids.device), **LOGITS)


def in_a_config(model, ids, mask):
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=5, do_sample=True, top_k=7, pad_token_id=0, eos_token_id=[50, 51])
    return generate(model, ids, mask, generation_config=config, do_sample=True, max_new_tokens=5)


def looked_up(model, ids, mask, **call):
    return generate(model, ids.repeat(1, 3), None, prompt_lookup_num_tokens=3, **call)


def padded_right(model, ids, mask):
    """Not how a decoder should be called; stock warns, and goes on."""
    return generate(model, ids.flip(1), mask.flip(1))


LOGITS = {"output_logits": True, "output_scores": True, "return_dict_in_generate": True}
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
    Mode("own-processor", own_processor, PAIR),
    Mode("own-criterion", own_criterion, PAIR),
    Mode("guided", guided),
    Mode("constrained", constrained, PAIR),
    Mode("constrained-beam", functools.partial(constrained, num_beams=3), PAIR),
    Mode("beam", {"num_beams": 4, "num_return_sequences": 2} | LOGITS, PAIR, share=4),
    Mode("beam-ends", {"num_beams": 3, "early_stopping": True, "length_penalty": 0.6} | ENDS, PAIR),
    Mode("beam-one-row", {"num_beams": 2}),
    Mode("beam-sample", SAMPLED | {"num_beams": 3, "top_k": 20}, PAIR),
    Mode("assisted", assistant, share=4),
    Mode("assisted-by-its-like", functools.partial(assistant, noise=0.1, **LOGITS)),
    Mode("assisted-by-itself", functools.partial(assistant, noise=0.0)),
    Mode("assisted-sample", functools.partial(assistant, noise=0.1, **SAMPLED)),
    Mode("early-exit", early_exit),
    Mode("prompt-lookup", looked_up, (5,)),
    Mode("prompt-lookup-sample", functools.partial(looked_up, **SAMPLED), (5,)),
    Mode("hidden-states", {"output_hidden_states": True, "return_dict_in_generate": True, "max_new_tokens": 3}, PAIR),
    Mode("attentions", attentions, PAIR),
    Mode("static", {"cache_implementation": "static", "disable_compile": True}, PAIR),
    Mode("static-object", static_object),
    Mode("dynamic-by-name", {"cache_implementation": "dynamic"}, PAIR),
    Mode("no-cache", {"use_cache": False} | LOGITS, PAIR),
    Mode("no-cache-beam", {"use_cache": False, "num_beams": 2}),
    Mode("embeddings", embedded, PAIR),
    Mode("embeddings-and-ids", functools.partial(embedded, with_ids=True)),
    Mode("chunked-prefill", {"prefill_chunk_size": 4}, (11,)),
    Mode("chunked-prefill-padded", {"prefill_chunk_size": 3}, (11, 6)),
    Mode("given-cache", given_cache),
    Mode("given-cache-padded", given_cache, PAIR),
    Mode("given-cache-plain", functools.partial(given_cache, plain=True)),
    Mode("continued", continued),
    Mode("continued-padded", continued, PAIR),
    Mode("continued-sample", functools.partial(continued, **SAMPLED), PAIR),
    Mode("prefilled", prefilled),
    Mode("prefilled-rows", prefilled, (7, 7)),
    Mode("fanned-out", fanned_out),
    Mode("cropped", cropped),
    Mode("streamer", streamed),
    Mode("stop-strings", stopped, PAIR),
    Mode("max-time", timed),
    Mode("positions", explicit_positions, PAIR),
    Mode("own-loop", own_loop, PAIR),
    Mode("generation-config", in_a_config, PAIR),
    Mode("padded-right", padded_right, PAIR),
    Mode("inference-mode", torch.inference_mode()(lambda model, ids, mask: generate(model, ids, mask, **LOGITS)), PAIR),
)  # fmt: skip
