"""Ways of calling `generate` that take more than keywords: functions of (model, ids, mask).

Assistants, caches and streamers keep state, so each call makes them anew, from a fixed seed.
"""

import copy
import functools

import torch

from accel.llm.generation.loop import store_loop, token_loop
from support.llm.families import make, padded, prompt
from support.llm.miniatures.family import VOCAB
from support.llm.outputs import flat, generate


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


def followed_by_numbers(model, lengths=(7, 4), seed=3, **call) -> dict[str, torch.Tensor]:
    """Tokens, and the random numbers that come after them."""
    ids, mask = (tensor.to(model.device) for tensor in padded(lengths))
    torch.manual_seed(seed)
    call = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "attention_mask": mask, **call}
    return flat(model.generate(ids, **call)) | {"random": torch.rand(3, device=model.device)}


def gone_on(model, new: int) -> tuple:
    """Texts of three calls with one cache, some ended early, and how long the cache is after each; the cache."""
    cache, kept = new_cache(model), {}
    for turn, eos in enumerate(([5, 9, 11, 20, 33, 41], [2], [60, 61, 62, 63])):
        before = kept[f"ids {turn - 1}"] if turn else prompt(1, 5).to(model.device)
        ids = torch.cat([before, prompt(1, 3, turn).to(model.device)], 1)
        kept[f"ids {turn}"] = model.generate(
            ids, past_key_values=cache, max_new_tokens=new, do_sample=False, eos_token_id=eos, pad_token_id=0
        )
        kept[f"length {turn}"] = torch.tensor(cache.get_seq_length())
    return kept, cache


def unaliased(model) -> bool:
    """Whether the logits of each step stay as they were."""
    kept, output = [], None
    for step in range(6):
        cache = output.past_key_values if output else None
        output = model(prompt(1, 5 if step == 0 else 1, step).to(model.device), past_key_values=cache)
        kept.append((output.logits, output.logits.clone()))
    return all(torch.equal(*pair) for pair in kept)


def counting(monkeypatch, *methods: tuple[object, str, bool]) -> list[int]:
    """From now on, how often each method of (owner, name, given) is called; where `given`, and gives something."""
    counts = [0] * len(methods)

    def counted(place: int, call, given: bool):
        def counting_call(*args, **kwargs):
            counts[place] += not given  # also of a call that raises
            found = call(*args, **kwargs)
            counts[place] += given and found is not None
            return found

        return counting_call

    for place, (owner, name, given) in enumerate(methods):
        monkeypatch.setattr(owner, name, counted(place, getattr(owner, name), given))
    return counts


def counting_loops(monkeypatch) -> list[int]:
    """[loops, steps]: from now on, how often the loop ran, and how many steps it launched."""
    return counting(monkeypatch, (token_loop.TokenLoop, "run", False), (store_loop, "next_logits", False))


def random_calls(count: int, seed: int, ways: tuple[dict, ...], longest: int, rows: int, most_new: int):
    """(ids, mask, keywords) of generate: other rows, lengths, numbers of new words and ways in each call."""
    g = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high + 1, (), generator=g))

    for _ in range(count):
        ids, mask = padded([number(1, longest) for _ in range(number(1, rows))], seed=number(0, 99))
        yield ids, mask, {"max_new_tokens": number(1, most_new)} | ways[number(0, len(ways) - 1)]
