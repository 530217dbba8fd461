"""The server in front of replicas, over HTTP: nothing is lost with a replica, and nothing is said twice."""

from concurrent.futures import ThreadPoolExecutor

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

TEXTS = ["The", "It was", "Once upon a time there", "She said that"]


def complete(front, text, most=12, stream=False, **given):
    given = {"model": front._model_manager.force_model, "temperature": 0} | given
    found = front.client.completions.create(prompt=text, max_tokens=most, stream=stream, **given)
    return "".join(one.choices[0].text or "" for one in found) if stream else found.choices[0].text


def written(stock, text, most=12):
    return stock.tokenizer.decode(stock(text, most), skip_special_tokens=True)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.share(2)
@pytest.mark.turns(2)
def test_many_requests_are_answered_by_both(front, pool, stock, stream):
    with ThreadPoolExecutor(8) as clients:
        found = list(clients.map(lambda text: complete(front, text, stream=stream), TEXTS * 2))
    assert found == [written(stock, text) for text in TEXTS] * 2
    assert len(pool.asked) == 8 and all(one.manager.current_batch for one in pool.replicas)


def test_chats_are_those_of_the_model(front, pool):
    said = [{"role": "user", "content": "Who is he?"}]
    given = {"model": front._model_manager.force_model, "messages": said, "max_tokens": 8, "temperature": 0}
    whole = front.client.chat.completions.create(**given).choices[0].message.content
    parts = front.client.chat.completions.create(**given, stream=True)
    assert whole and "".join(part.choices[0].delta.content or "" for part in parts) == whole


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_stream_goes_on_at_another_replica(front, pool, stock, after):
    pool.lose, pool.after = 1, after
    assert complete(front, TEXTS[0], 24, stream=True) == written(stock, TEXTS[0], 24)
    first, second = pool.asked
    assert pool.cut == 1 and first.generated == []
    sent = second.generated  # a piece may hold more than one token
    assert len(sent) >= after and sent == stock(TEXTS[0], 24)[: len(sent)]


@pytest.mark.turns(2)
def test_a_sampled_answer_goes_on_with_its_draws(front, pool, stock):
    given = {"temperature": None, "extra_body": {"generation_config": '{"do_sample": true, "temperature": 3.0}'}}
    whole = [complete(front, "The", 16, True, seed=seed, **given) for seed in (1, 2)]
    assert whole[0] != whole[1]
    pool.lose, pool.after = 2, 3
    assert complete(front, "The", 16, True, seed=1, **given) == whole[0]
    assert pool.cut == 2 and len({one.settings["seed"] for one in pool.asked[2:]}) == 1
    complete(front, "The", 2, **given)
    complete(front, "The", 2, **given)
    assert len({one.settings["seed"] for one in pool.asked}) == 4  # who gives none gets one of his own


@pytest.mark.turns(2)
def test_an_answer_that_is_not_streamed_is_begun_anew(front, pool, stock):
    pool.lose = 3
    assert complete(front, TEXTS[1]) == written(stock, TEXTS[1])
    assert pool.cut == 3 and all(one.generated == [] for one in pool.asked)


@pytest.mark.turns(2)
def test_what_ends_every_replica_is_not_handed_on_for_ever(front, pool):
    pool.lose = 9
    with pytest.raises(openai.InternalServerError) as failed:
        complete(front, TEXTS[1])
    assert "each of 5 replicas that were to answer was lost, the last by: " in failed.value.response.json()["detail"]
    assert pool.cut == 5
    pool.lose = 0
    assert complete(front, TEXTS[1], 3)


def test_other_errors_are_told_at_once(front, pool, monkeypatch):
    async def broken(question):
        raise ZeroDivisionError("no lost replica")
        yield

    monkeypatch.setattr(front.replicas, "_ask", broken)
    with pytest.raises(openai.InternalServerError) as failed:
        complete(front, TEXTS[1])
    assert "no lost replica" in failed.value.response.json()["detail"]
    assert not front.replicas._tasks and not front.replicas._callbacks


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_longer_than_the_model(front, stock, stream):
    complete(front, "The", 1)  # the first replica to answer says how long one may be
    with pytest.raises(openai.BadRequestError) as refused:
        complete(front, "The " * 600, stream=stream)
    assert "where a request may come to 512" in refused.value.response.json()["detail"]


@pytest.mark.turns(2)
def test_an_id_twice(front, pool, stock):
    given = {"model": front._model_manager.force_model, "prompt": "The", "max_tokens": 80, "temperature": 0}
    headers = {"extra_headers": {"x-request-id": "twice"}}
    first = front.client.completions.create(**given, stream=True, **headers)
    begun = next(iter(first)).choices[0].text
    for stream in (True, False):
        with pytest.raises(openai.BadRequestError) as refused:
            complete(front, "It", stream=stream, **headers)
        assert "under way" in refused.value.response.json()["detail"]
    assert begun + "".join(one.choices[0].text or "" for one in first) == written(stock, "The", 80)


def test_closed_it_leaves_stocks_own_names(pool):
    from transformers.cli.serving import model_manager, utils

    from accel.replicas.front import Front

    names = (model_manager, "ModelManager"), (utils, "CBGenerateManager"), (utils, "set_torch_seed")
    before = [getattr(*name) for name in names]
    front = Front(pool.replicas[0].model.name_or_path, pool, log_level="error")
    assert [getattr(*name) for name in names] != before
    (timed,) = front._model_manager.loaded_models.values()
    assert {one.device.type for one in timed.model.parameters()} == {"meta"}
    front.close()
    assert [getattr(*name) for name in names] == before
    with pytest.raises(OSError):
        Front("no/such/folder/or/name", pool, log_level="error")
    assert [getattr(*name) for name in names] == before
