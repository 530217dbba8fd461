"""Every mode of generate(), in one process or on ranks. Run by `support.ranks.RankPool`, on all ranks at once."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, LogitsProcessorList, StoppingCriteriaList

import accel
from accel.errors import logged
from accel.llm.generation.loop import handover
from accel.llm.generation.loop.token_loop import TokenLoop
from support.llm.parallel.ranks import counted, load

PLAIN = {"max_new_tokens": 5, "eos_token_id": None, "pad_token_id": 0}
SEED = 7


class Streamer:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.given: list = []

    def put(self, value: torch.Tensor) -> None:
        self.given.append(value.tolist())

    def end(self) -> None:
        self.given.append("end")


def ends_early(ids: torch.Tensor, scores: Any, **given: Any) -> torch.Tensor:
    """A stopping criterion of a user's own."""
    return ids[:, -1] % 5 == 0


def tilted(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A logits processor of a user's own."""
    return scores - 0.3 * scores.roll(1, -1)


def by_hand(model: nn.Module, input_ids: torch.Tensor, generation_config: Any, **given: Any) -> torch.Tensor:
    """A decoding method of a user's own: the second best token."""
    cache = DynamicCache(config=model.config)
    tokens = input_ids
    while input_ids.shape[1] < generation_config.max_length:
        logits = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
        tokens = logits[:, -1].topk(2).indices[:, 1:]
        input_ids = torch.cat([input_ids, tokens], 1)
    return input_ids


def cases(model: nn.Module, drafts: dict[str, nn.Module], streamer: Streamer) -> dict[str, dict]:
    """Keywords of generate(), by the name of a mode."""
    one = torch.tensor([[5, 6, 7, 8, 5, 6, 7]])
    two = torch.tensor([[5, 6, 7, 8], [9, 9, 3, 11]])
    padded = {
        "input_ids": torch.tensor([[0, 0, 7, 8], [9, 9, 3, 11]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1], [1] * 4]),
    }
    leads = not dist.is_initialized() or dist.get_rank() == 0
    return {
        "greedy": {"input_ids": two},
        "left padding": padded,
        "sampling": {"input_ids": two, "do_sample": True, "top_k": 20, "temperature": 0.8, "min_p": 0.01},
        "several": {"input_ids": one, "do_sample": True, "num_return_sequences": 3},
        "beams": padded | {"num_beams": 3, "num_return_sequences": 2, "early_stopping": True, "eos_token_id": 12},
        "beams drawn": {"input_ids": two, "num_beams": 3, "do_sample": True},
        **{f"assisted, {name}": {"input_ids": one, "assistant_model": draft} for name, draft in drafts.items()},
        "assisted and drawn": {"input_ids": one, "assistant_model": drafts["draft divided"], "do_sample": True},
        "prompt lookup": {"input_ids": one, "prompt_lookup_num_tokens": 3},
        "streamer": {"input_ids": one, "streamer": streamer if leads else None},
        "criteria": {"input_ids": two, "stopping_criteria": StoppingCriteriaList([ends_early]), "eos_token_id": [3, 4]},
        "processor": {"input_ids": two, "logits_processor": LogitsProcessorList([tilted])},
        "processors": {"input_ids": two, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "guidance_scale": 1.2},
        "a cache given": {"input_ids": one, "past_key_values": DynamicCache(config=model.config)},
        "embeddings": {"inputs_embeds": model.get_input_embeddings()(one)},
        "scores": {"input_ids": two, "return_dict_in_generate": True, "output_scores": True},
        "a method given": {"input_ids": one, "custom_generate": by_hand},
        "static cache": {"input_ids": two, "cache_implementation": "static"},
        "no cache": {"input_ids": two, "use_cache": False},
    }  # fmt: skip


STOCK = {"static cache", "no cache"}  # which have no fast path in one process either


@torch.no_grad()
def all_modes(folder: str, draft: str) -> dict[str, dict]:
    """By mode: tokens, sums and fallbacks; further what a streamer got, verify, max_time and the model restored."""
    ranks = dist.is_initialized()
    whole: Callable[[str], nn.Module] = lambda path: AutoModelForCausalLM.from_pretrained(path).eval()  # noqa: E731
    divided = (lambda path: load(path, {"tp_size": dist.get_world_size()})) if ranks else whole
    model, found = accel.optimize(divided(folder), cpu="fuse"), {}
    drafts = {"draft stock": whole(draft), "draft fast": accel.optimize(whole(draft), cpu="fuse")}
    drafts["draft divided"] = accel.optimize(divided(draft), cpu="fuse")
    streamer, past = Streamer(), 0
    for name, given in cases(model, drafts, streamer).items():
        torch.manual_seed(SEED)
        with counted() as collectives:
            written = model.generate(**(PLAIN | given))
        calls = sum(calls for _, _, calls in accel.report(model).fallbacks)
        tokens = written if isinstance(written, torch.Tensor) else written.sequences
        found[name] = {"tokens": tokens.tolist(), "sums": collectives["all_reduce"], "fallbacks": calls - past}
        past = calls
    ids = torch.tensor([[5, 6, 7]])
    clocks = {"max_time": {"max_time": 5.0}, "max_time criterion": {"stopping_criteria": clock()}}
    for name, given in clocks.items() if ranks else ():
        try:
            found[name] = model.generate(ids, **PLAIN, **given).tolist()
        except Exception as error:
            found[name] = logged(error)
    quality = accel.verify(model)
    found |= {
        "streamed": streamer.given,
        "verify": quality.passed,
        "equal": quality.agreement.equal / quality.agreement.tokens,
    }
    found |= {"report": str(accel.report(model)), "told": accel.report(model).to_dict()}
    accel.restore(model)
    found |= {"restored": model.generate(ids, **PLAIN).tolist(), "nothing": str(accel.report(model))}
    return found


@torch.no_grad()
def ahead(folder: str) -> dict[str, tuple]:
    """Tokens, and how often the loop ran that is ahead of its tokens, which otherwise runs on GPUs alone."""
    ranks, loops, run = dist.is_initialized(), [], TokenLoop.run
    given = {"tp_size": dist.get_world_size()} if ranks else None
    model = load(folder, given) if ranks else AutoModelForCausalLM.from_pretrained(folder).eval()
    accel.optimize(model, cpu="fuse")
    streamer, two = Streamer(), torch.tensor([[5, 6, 7, 8], [9, 9, 3, 11]])
    ends = {"input_ids": two, "eos_token_id": [5, 9, 11, 30, 41, 52, 63], "max_new_tokens": 30}
    calls = {"greedy": {"input_ids": two}, "ends": ends, "drawn": ends | {"do_sample": True}}
    if not ranks or dist.get_rank() == 0:
        streamed = {"input_ids": two[:1], "streamer": streamer}
    else:
        streamed = {"input_ids": two[:1]}
    calls |= {"streamed": streamed | {"do_sample": True, "eos_token_id": list(range(3, 20)), "max_new_tokens": 30}}
    before, found = handover.DEVICES, {}
    handover.DEVICES = ("cpu", "cuda")
    TokenLoop.run = lambda self: loops.append(self) or run(self)  # type: ignore[method-assign, func-returns-value]
    try:
        for name, call in calls.items():
            torch.manual_seed(SEED)
            with counted() as collectives:
                found[name] = (model.generate(**(PLAIN | call)).tolist(), collectives["all_reduce"])
    finally:
        handover.DEVICES, TokenLoop.run = before, run  # type: ignore[method-assign]
    return found | {"loops": len(loops), "given": streamer.given}


def clock() -> StoppingCriteriaList:
    from transformers import MaxTimeCriteria

    return StoppingCriteriaList([MaxTimeCriteria(5.0)])
