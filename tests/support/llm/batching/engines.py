"""Engines, requests, and texts of tokens."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from accel.llm.batching.engine import Engine
from accel.llm.batching.limits import Limits
from accel.llm.batching.request import Request
from accel.llm.batching.sampling import Sampling
from accel.llm.generation.decoder import DecoderForward
from accel.llm.kv_cache.layer_sets import LayerSet
from accel.llm.kv_cache.shape import BLOCK
from support.llm.kv_cache.blocks import check_blocks
from support.llm.miniatures.family import VOCAB

GREEDY = Sampling()


def forward_of(model: nn.Module) -> DecoderForward:
    forward = vars(model)["forward"]
    assert isinstance(forward, DecoderForward)
    return forward


def engine_of(model: nn.Module, **limits) -> Engine:
    return Engine(forward_of(model), Limits(**{"rows": 4, "tokens": 16, "context": 256, "blocks": 64} | limits))


def request(name: str, prompt: Sequence[int], new: int | None = 8, sampling: Sampling = GREEDY, **more) -> Request:
    return Request(name, list(prompt), new, more.pop("eos", frozenset()), sampling, **more)


def requests(lengths: Sequence[int], news: Sequence[int] | int, seed: int = 0, **more) -> list[Request]:
    """Named by their numbers, of random prompts."""
    news = [news] * len(lengths) if isinstance(news, int) else news
    prompts = prompts_of(lengths, VOCAB, seed)
    return [request(str(number), *one, **more) for number, one in enumerate(zip(prompts, news, strict=True))]


def step(engine: Engine) -> list[Request]:
    """What a step tells. Blocks and slots are accounted for; what nobody holds becomes NaN, or codes scaled by it."""
    told = engine.step()
    check_blocks(engine.allocator)
    for kept in engine.kv_cache.kept:
        kept[:, :, engine.allocator.unused] = torch.nan if kept.is_floating_point() else -128
    for several in engine.kv_cache.by_states.values():
        for states in several:
            if states is not None:
                states[:, engine.allocator.states.unused] = torch.nan
    return told


def stepped(engine: Engine, most: int = 2000) -> list[Request]:
    """What steps tell, until there is nothing left to do. Nothing is lost: every block comes back."""
    told: list[Request] = []
    for _ in range(most):
        if not engine.busy:
            break
        told += step(engine)
    assert not engine.busy and engine.allocator.free == engine.allocator.blocks - 1
    assert len(engine.rows.idle) == engine.limits.rows
    return told


def finished(engine: Engine, requests: Iterable[Request] = ()) -> list[Request]:
    """All requests that end, in the order in which they do."""
    ended = [one for request in requests for one in engine.add(request)]
    ended += [one for one in stepped(engine) if one.finished]
    assert len(ended) == len(set(map(id, ended)))
    return ended


def prompts_of(lengths: Sequence[int], vocabulary: int, seed: int = 0) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (length,), generator=g).tolist() for length in lengths]


def alone(stock: nn.Module, prompt: Sequence[int], new: int, eos: int | None = None, **given) -> list[int]:
    """What stock's generate() adds to the prompt by itself."""
    ids = torch.tensor([list(prompt)], device=stock.device)
    config = {"do_sample": False, "eos_token_id": eos, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    return stock.generate(ids, max_new_tokens=new, **(config | given))[0, len(prompt) :].tolist()


def as_alone(stock: nn.Module, requests: Iterable[Request], **given) -> None:
    """Each has what stock gives it by itself."""
    for one in requests:
        assert one.error is None and one.finished, one.error
        assert one.tokens == alone(stock, one.prompt, one.max_new_tokens, **given), one.id


FULL, NARROW, WIDE = LayerSet((0,), None), LayerSet((1,), 70), LayerSet((2,), 3 * BLOCK)
ROWS = 4


def text(letters, tail: int = 0) -> list[int]:
    """A block of each letter, and the beginning of one more: texts with equal blocks behind different ones."""
    return [letter for letter in letters for _ in range(BLOCK)] + [7] * tail
