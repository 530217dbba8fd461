"""One model for long: many calls of many lengths, several threads, caches that are kept and caches that are dropped."""

import copy
import gc
import itertools
import threading
import weakref

import pytest
import torch

import accel
from support.llm.calls import longer, random_calls
from support.llm.families import BY_NAME, FAMILIES, padded, prompt
from support.llm.modes import MODES
from support.llm.outputs import flat, generate, same
from support.together import together

CORE = [family.name for family in FAMILIES if family.core]
MODE = {mode.name: mode for mode in MODES}


def held() -> tuple[int, int]:
    """Python objects, and bytes of tensors, that are alive."""
    gc.collect()
    objects = gc.get_objects()
    return len(objects), sum(t.untyped_storage().nbytes() for t in objects if issubclass(type(t), torch.Tensor))


WAYS = ({}, {"do_sample": True}, {"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True})


def unseeded(model, ids, mask, **call):
    """Threads share the seed; and torch remembers every seed for a GPU that may come."""
    return flat(model.generate(ids, attention_mask=mask, **({"max_new_tokens": 8, "do_sample": False} | call)))


def growth(call, times: int = 3) -> tuple[int, int]:
    """Objects and bytes that one call leaves behind: the least of several, since libraries fill caches at leisure."""
    sizes = [held()]
    for _ in range(times):
        call()
        sizes.append(held())
    return tuple(min(after[i] - before[i] for before, after in itertools.pairwise(sizes)) for i in range(2))


@pytest.mark.turns(4)
def test_many_calls_of_random_lengths_are_right_and_hold_nothing(pair, few_objects):
    ours, stock = pair("llama")
    for ids, mask, call in random_calls(20, 0, WAYS, 20, 4, 12):
        same(generate(ours, ids, mask, **call), generate(stock, ids, mask, **call))
    seeds = itertools.count(1)

    def some():
        for ids, mask, call in random_calls(13, next(seeds), WAYS, 20, 4, 12):
            unseeded(ours, ids, mask, **call)

    objects, size = growth(some)
    assert objects < 10 and size <= 0


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_cache_is_freed_with_its_last_user(name, pair_of, few_objects):
    ours, _ = pair_of(name)
    unseeded(ours, *padded())
    before = held()[1]
    output = ours.generate(prompt(2, 40), max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    cache = output.past_key_values
    assert held()[1] > before
    gone = weakref.ref(cache)
    del output, cache
    assert held()[1] <= before and gone() is None


@pytest.mark.parametrize("name", CORE)
@pytest.mark.share(6)
@pytest.mark.turns(2)
def test_a_cache_that_is_kept_stays_as_it_is(name, pair_of):
    """Whatever else is generated meanwhile; then the conversation goes on."""
    ours, stock = pair_of(name)

    def talk(model, others):
        ids, mask = padded()
        call = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
        output = model.generate(ids, attention_mask=mask, **call)
        kept = [copy.deepcopy(output.past_key_values) for _ in range(2)]
        for mode in others:
            MODE[mode](model, *padded(MODE[mode].lengths, seed=7))
        ids, mask = longer(output.sequences, mask)
        found = {}
        for number, cache in enumerate((kept[0], output.past_key_values, kept[1])):
            found |= flat(
                model.generate(ids, attention_mask=mask, past_key_values=cache, **call).sequences, str(number)
            )
            generate(model, *padded((3, 4, 5)))
        return found

    others = ("greedy", "greedy-padded", "beam", "sample-several", "assisted", "continued")
    same(talk(ours, [mode for mode in others if BY_NAME[name].takes(mode)]), talk(stock, ()))


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
@pytest.mark.share(5)
@pytest.mark.turns(4)
def test_threads_that_generate_at_once(name, pair_of):
    """Each with its own prompts, batch sizes and ways; as without the others."""
    ours, stock = pair_of(name)
    jobs = [
        [(padded(lengths, seed=10 * number + turn), call) for turn in range(3)]
        for number, (lengths, call) in enumerate(
            [((9,), {}), ((9, 5), {}), ((4, 7, 6), {}), ((5,), {"num_beams": 3}), ((9, 5), {"max_new_tokens": 20})]
        )
    ]
    wanted = [[generate(stock, *inputs, **call) for inputs, call in job] for job in jobs]
    start = threading.Barrier(len(jobs))

    def work(job, results):
        start.wait()
        with torch.no_grad():
            for _ in range(3):
                for (inputs, call), result in zip(job, results, strict=True):
                    same(unseeded(ours, *inputs, **call), result)

    together(work, zip(jobs, wanted, strict=True))


def test_a_thread_that_fails_leaves_the_others_alone(pair_of):
    ours, stock = pair_of("llama")
    ids, mask = padded()
    wanted = unseeded(stock, ids, mask)

    def interrupt(input_ids, scores):
        if input_ids.shape[1] > 11:
            raise KeyboardInterrupt
        return scores

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            ours.generate(ids, attention_mask=mask, max_new_tokens=8, logits_processor=[interrupt])
        same(unseeded(ours, ids, mask), wanted)


def test_a_layer_that_raises_leaves_the_model_usable(pair):
    """In the middle of a step, with half of the layers' keys written; the same cache goes on."""
    from transformers import DynamicCache

    ours, stock = pair("llama")
    outputs = []
    for model in (ours, stock):
        cache, found = DynamicCache(config=model.config), {}
        found["0"] = model(prompt(2, 6), past_key_values=cache).logits
        handle = model.get_output_embeddings().register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model(prompt(2, 1, 1), past_key_values=DynamicCache(config=model.config))
        handle.remove()
        found["1"] = model(prompt(2, 1, 2), past_key_values=cache).logits
        outputs.append(found | generate(model, *padded()))
    same(*outputs)


def fail(*args):
    raise ZeroDivisionError


@pytest.mark.turns(2)
def test_restored_and_optimized_over_and_over(pair):
    ours, stock = pair("llama")
    ids, mask = padded()
    wanted = generate(stock, ids, mask)

    def there_and_back():
        accel.restore(ours)
        same(unseeded(ours, ids, mask), wanted)
        accel.optimize(ours)
        same(unseeded(ours, ids, mask), wanted)

    there_and_back()
    objects, size = growth(there_and_back)
    assert objects < 10 and size <= 0


def test_no_memory_for_a_longer_text_says_so_and_leaves_model_and_cache_usable(pair, monkeypatch):
    ours, stock = pair("llama")
    ids, word, empty = prompt(1, 9), prompt(1, 1, 3), torch.empty
    kept, theirs = ours(ids).past_key_values, stock(ids).past_key_values

    def little(*size, **kwargs):
        made = empty(*size, **kwargs)
        if made.nbytes > 2**20:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return made

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", little)
        with pytest.raises(torch.OutOfMemoryError, match="no memory for keys and values of 5000 tokens in 2 rows"):
            ours(prompt(2, 5000))
        with pytest.raises(torch.OutOfMemoryError, match="5009 tokens in 1 rows: .* GiB wanted; the 9 stored are kept"):
            ours(prompt(1, 5000), past_key_values=kept)
        with pytest.raises(torch.OutOfMemoryError, match="no memory for keys and values"):
            generate(ours, prompt(2, 5000), None)
    same({"x": ours(word, past_key_values=kept).logits}, {"x": stock(word, past_key_values=theirs).logits})
    same(generate(ours, ids, None), generate(stock, ids, None))
