"""Requests batched by ranks that share a model: each gets what it gets alone, or from one process."""

import copy

import pytest
import torch
from torch.distributed.tensor import placement_types

import accel
from support.everything import EVERYTHING
from support.llm.batching.engines import alone
from support.llm.families import BY_NAME, every
from support.llm.miniatures.family import VOCAB
from support.llm.parallel import batches

PROMPTS = [[5, 6, 7], [9] * 9, [3, 4], [8] * 20, [5, 6, 7, 8]]
LONG = [
    [3 + (7 * place + number) % (VOCAB - 3) for place in range(length)] for number, length in enumerate((90, 70, 5))
]
TIGHT = {"num_blocks": 4, "max_batch_tokens": 16, "max_requests_per_batch": 3}
DRAWN = {"do_sample": True, "num_return_sequences": 2, "top_k": 30, "temperature": 0.9}
FAMILIES = (
    "llama",
    "qwen3",
    "gemma2",
    "phi3",
    "mistral",
    "qwen2-moe",
    "gpt-oss",
    "granite",
    "mixtral",
    "olmo2",
    "ministral",
)


def both(found, number):
    """What the ranks gave to a call of `batches.several`, which is the same on both."""
    answers = [rank["calls"][number][0] for rank in found]
    assert answers[0] == answers[1]
    return answers[0]


def takes_masks_for_one_another() -> bool:
    kind = getattr(placement_types, "MaskPartial", None) or placement_types._MaskPartial  # 2.10's name, and after
    one, other = (kind(offset_shape=torch.Size((8, 2)), offset_dim=0) for _ in range(2))
    return one == other


@pytest.mark.share(3)
@pytest.mark.parametrize("name", [name for (name,) in every(2, FAMILIES)])
@pytest.mark.turns(3)
def test_each_request_gets_what_stock_gives_it_alone(name, ranks, saved_model):
    if name == "gemma2" and takes_masks_for_one_another():
        pytest.skip("torch 2.10: a divided embedding that is scaled raises in a second thread, in stock code too")
    folder, stock = saved_model(name)
    found = ranks.run(batches.several, folder, [(PROMPTS, {}, {})], BY_NAME[name].attention)
    assert both(found, 0) == {f"req_{n}": (alone(stock, prompt, 6), None) for n, prompt in enumerate(PROMPTS)}
    for rank in found:
        [(_, collectives)], [pool] = rank["calls"], rank["batching"]
        assert not rank["fallbacks"] and pool["requests"] == len(PROMPTS)
        assert collectives["all_reduce"] >= 6 * stock.config.num_hidden_layers  # in every step, a layer's at least


@pytest.mark.turns(4)
def test_draws_chunks_and_pages_that_run_out_are_those_of_one_process(ranks, saved_model):
    """Answers are drawn, prompts read in pieces, requests wait for pages: all by decisions that ranks must share."""
    folder, stock = saved_model("llama")
    calls = [
        (PROMPTS, DRAWN, {}),
        (LONG + LONG, {"max_new_tokens": 30}, TIGHT),
        (LONG, DRAWN | {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}, TIGHT),
        ([PROMPTS[0], [], [10**6]], {}, {}),
        (PROMPTS, {"eos_token_id": [60, 13, 42], "max_new_tokens": 20}, {"return_logprobs": True}),
    ]
    found = ranks.run(batches.several, folder, calls)
    one = accel.optimize(copy.deepcopy(stock), cpu="fuse")
    for number, call in enumerate(calls):
        wanted = batches.batch(one, *call)
        assert both(found, number) == wanted, call
    failed = [error for _, error in both(found, 3).values()]
    assert failed[0] is None and all(failed[1:]) and len(failed) == 3


@pytest.mark.skipif(not EVERYTHING, reason="seconds of work; ACCEL_TEST_EVERYTHING=1 runs it")
def test_four_ranks(rank_pool, saved_model):
    folder, stock = saved_model("llama-mha")
    found = rank_pool(4).run(batches.several, folder, [(PROMPTS, DRAWN, TIGHT)])
    wanted = batches.batch(accel.optimize(copy.deepcopy(stock), cpu="fuse"), PROMPTS, DRAWN, TIGHT)
    assert [rank["calls"][0][0] for rank in found] == [wanted] * 4


@pytest.mark.parametrize(
    "options", [{"weights": "int8"}, {"kv_cache": "int8"}], ids=lambda options: next(iter(options))
)
@pytest.mark.turns(2)
def test_fewer_bits_are_those_of_one_process(options, ranks, saved_model):
    folder, stock = saved_model("llama", hidden_size=128, intermediate_size=128)
    found = ranks.run(batches.several, folder, [(PROMPTS, {}, {})], None, options)
    one = accel.optimize(copy.deepcopy(stock), cpu="fuse", **options)
    assert both(found, 0) == batches.batch(one, PROMPTS, {}, {})
    assert not found[0]["fallbacks"]


@pytest.mark.turns(2)
def test_the_first_rank_alone_gets_requests(ranks, saved_model):
    folder, stock = saved_model("llama")
    words = alone(stock, [3, 4], 40)
    leader, other = ranks.run(batches.live, folder, "own settings", words[10])
    one = accel.optimize(copy.deepcopy(stock), cpu="fuse")
    manager = one.init_continuous_batching(
        generation_config=batches.config(), continuous_batching_config=batches.batching()
    )
    manager.start()
    manager.add_request([9] * 9, "drawn", do_sample=True, temperature=0.8, top_k=20, seed=5)
    wanted = manager.get_result("drawn", timeout=120)
    manager.stop()
    assert leader["drawn"] == (wanted.generated_tokens, None)
    assert leader["plain"] == leader["late"] == (alone(stock, [5, 6, 7], 6), None)
    assert leader["penalized"] == (alone(stock, [8] * 20, 6, repetition_penalty=1.5), None)
    assert leader["streamed"][-1] == alone(stock, [6, 5], 6) and len(leader["streamed"]) == 6
    assert leader["words"] == (words[: words.index(words[10]) + 1], None)
    assert "not one of the model's" in leader["wrong"][1] and "cancelled" in leader["endless"][1]
    assert other == {key: leader[key] for key in ("running", "steps", "fatal")}
    assert not other["running"] and other["fatal"] is None and other["steps"] > 6


@pytest.mark.turns(4)
def test_a_pause_of_the_first_rank_holds_all(ranks, saved_model):
    folder, stock = saved_model("llama")
    leader, _ = ranks.run(batches.live, folder, "paused", None)
    assert leader["still"]
    assert leader["before"] == (alone(stock, [5, 6, 7], 60), None)
    assert leader["behind"] == (alone(stock, [5, 6, 7], 6), None)


@pytest.mark.parametrize(
    ("which", "words"),
    [("config", "temperature"), ("limits", "max_batch_tokens"), ("training", "the model")],
)
def test_what_ranks_do_not_agree_on_is_refused(which, words, ranks, saved_model):
    folder, stock = saved_model("llama")
    (told, then), other = ranks.run(batches.refused, folder, which)
    assert other == [told, then]
    assert told.startswith("Refused: generate_batch") and words in told and "on rank 1" in told
    if which != "config":
        assert then == str({"req_0": (alone(stock, [5, 6, 7], 6), None)})


@pytest.mark.turns(2)
def test_what_may_be_called_beside_a_manager(ranks, saved_model):
    folder, stock = saved_model("llama")
    for found in (told := ranks.run(batches.managers, folder)):
        assert "computes with all ranks" in found["second manager"] and "Refused" in found["generate beside"]
        assert found["generate in a pause"] == found["generate restored"] == [[5, 6, 7, *alone(stock, [5, 6, 7], 6)]]
        assert not found["restored"]
    assert told[0]["last"] and "another rank" in told[0]["last"][0]
