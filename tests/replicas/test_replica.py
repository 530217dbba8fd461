"""A replica by itself: its answers, those who hang up, and its end."""

import pickle
import time

import pytest
from transformers import ContinuousBatchingConfig, GenerationConfig

import accel

pytest.importorskip("fastapi")

from accel.replicas.replica import Question, Replica, ReplicaEnded

TEXT = "The carriage was at the door, and"


def question(stock, streaming=True, most=12, generated=(), **settings):
    given = {"max_new_tokens": most, "streaming": streaming} | settings
    return Question(stock.tokenizer(TEXT).input_ids, given, list(generated))


async def pieces(replica, asked):
    return [piece async for piece in replica.answer(asked)]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.turns(2)
def test_an_answer_is_the_models(replicas, stock, within, streaming):
    found = within(pieces(replicas[0], question(stock, streaming)))
    assert [token for piece in found for token in piece.tokens] == stock(TEXT, 12)
    assert [piece.finished for piece in found] == [False] * (len(found) - 1) + [True]
    assert len(found) > 1 if streaming else len(found) == 1
    assert found[-1].error is None and found[-1].longest == 512
    assert accel.report(replicas[0].model).optimized and not accel.report(replicas[0].model).fallbacks


def test_only_what_is_new_is_sent(replicas, stock, within):
    whole = stock(TEXT, 12)
    found = within(pieces(replicas[0], question(stock, generated=whole[:5])))
    assert [token for piece in found for token in piece.tokens] == whole[5:]


def test_a_question_and_its_pieces_can_be_sent(replicas, stock, within):
    asked = question(stock, most=6, generation_config=GenerationConfig(do_sample=True, temperature=2.0), seed=3)
    mine, theirs = (within(pieces(one, pickle.loads(pickle.dumps(asked)))) for one in replicas)
    assert pickle.loads(pickle.dumps(mine)) == mine
    assert [token for piece in mine for token in piece.tokens] == [token for piece in theirs for token in piece.tokens]


def test_what_is_wrong_with_a_question_is_told(replicas, stock, within):
    (found,) = within(pieces(replicas[0], question(stock, temperature=-1.0)))
    assert found.finished and "temperature=-1.0" in found.error


def test_who_hangs_up_takes_no_more_steps(replicas, stock, within):
    async def first():
        answer = replicas[0].answer(question(stock, most=400))
        await anext(answer)
        await answer.aclose()

    within(first())
    until = time.monotonic() + 20
    while replicas[0].manager.engine.busy and time.monotonic() < until:
        time.sleep(0.01)
    assert not replicas[0].manager.engine.busy and replicas[0].manager.current_batch < 400


def test_one_that_has_ended_says_so(stock, within, monkeypatch):
    replica = Replica(stock.tokenizer.name_or_path, batching=ContinuousBatchingConfig(num_blocks=2), device="cpu")
    replica.check_health()
    within(pieces(replica, question(stock, most=2)))

    def broken():
        raise MemoryError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(replica.manager.engine, "step", broken)
    monkeypatch.setattr("accel.llm.batching.engine_thread.FAILURES", 1)
    for _ in range(2):  # the request that was in it, and one that comes later
        with pytest.raises(ReplicaEnded):
            within(pieces(replica, question(stock)))
    with pytest.raises(ReplicaEnded, match="illegal memory access"):
        replica.check_health()


def test_a_model_that_is_not_batched_by_accel_is_refused(stock, monkeypatch):
    monkeypatch.setattr(accel, "optimize", lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match="tiny-lm is not batched by accel: "):
        Replica(stock.tokenizer.name_or_path, device="cpu")
