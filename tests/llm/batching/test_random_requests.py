"""Random requests that come at random times, share beginnings, run out of pages and are cancelled: each as if alone."""

import copy
import random
from functools import cache

import pytest
import torch

import accel
from accel.llm.batching.sampling import Sampling
from accel.llm.kv_cache.layer_sets import layer_sets
from support.llm.batching.engines import engine_of, forward_of, request
from support.llm.families import FAMILIES, available, every
from support.spread import spread

FAST = [family.name for family in FAMILIES if family.expected == "fast" and available(family.kind)]
WINDOWS = [name for name in ("ministral", "gemma3", "gpt-oss") if name in FAST]
LENGTHS = (1, 2, 5, 20, 63, 64, 65, 90)  # around the end of a page, which windows pass
ROOM = 30  # tokens of an answer and more


def random_engine(model, chosen: random.Random):
    forward = forward_of(model)
    sets = layer_sets(forward.shapes(), [layer.spec.attention.sees for layer in forward.layers])
    return engine_of(
        model, rows=chosen.randint(1, 7), tokens=chosen.choice([3, 8, 17, 64, 200]), context=128,
        pages=len(sets) * chosen.randint(4, 10),
    )  # fmt: skip


def random_requests(vocabulary: int, most: int, chosen: random.Random) -> list:
    shared = [chosen.randrange(vocabulary) for _ in range(max(LENGTHS))]
    made = []
    for number in range(7):
        length = max(1, min(chosen.choice(LENGTHS), most - ROOM))
        own = [chosen.randrange(vocabulary) for _ in range(length)]
        prompt = shared[:length] if chosen.random() < 0.4 else own
        if chosen.random() < 0.3:
            prompt = prompt[:-1] + own[-1:]
        eos = frozenset(chosen.sample(range(vocabulary), chosen.choice([0, 3, 20])))
        sampling = Sampling(penalty=chosen.choice([1.0, 1.3]))
        made.append(request(str(number), prompt, chosen.choice([1, 2, 7, 15]), sampling, eos=eos))
    return made


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", dict.fromkeys([*WINDOWS, *(name for (name,) in every(12, FAST))]))
def test_each_is_as_if_alone(name, seed, pair_of):
    as_if_alone(*pair_of(name), seed)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", [*WINDOWS, "llama", "mixtral"])
def test_layers_on_several_devices(name, seed, pair_of):
    _, stock = pair_of(name)
    as_if_alone(spread_of(name, pair_of), stock, seed)


@cache
def spread_of(name, pair_of):
    return accel.optimize(spread(copy.deepcopy(pair_of(name)[1]), first=1))


def as_if_alone(model, stock, seed):
    config, chosen = stock.config.get_text_config(), random.Random(seed)
    most = min(getattr(config, "max_position_embeddings", None) or 128, 128)
    if most <= ROOM:
        pytest.skip("too few positions for an answer")
    engine, asked = random_engine(model, chosen), random_requests(config.vocab_size, most, chosen)
    coming = sorted((chosen.choice([0, 0, chosen.randint(1, 15)]), number) for number in range(len(asked)))
    cancelled, when = chosen.choice(asked), chosen.randint(1, 20)
    for step in range(2000):
        while coming and coming[0][0] <= step:
            engine.add(asked[coming.pop(0)[1]])
        if step == when:
            engine.cancel(cancelled.id)
        engine.step()
        engine.pool.check()
        if not coming and not engine.busy:
            break
    assert engine.pool.free == engine.pool.pages - 1 and not engine.ids
    for one in asked:
        if one is cancelled and one.error is not None:
            continue
        assert one.error is None, one.error
        ids = torch.tensor([one.prompt])
        wanted = stock.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=one.max_new_tokens, do_sample=False,
            pad_token_id=0, eos_token_id=list(one.eos) or None, repetition_penalty=one.sampling.penalty,
        )  # fmt: skip
        assert one.tokens == wanted[0, len(one.prompt) :].tolist(), one.id
