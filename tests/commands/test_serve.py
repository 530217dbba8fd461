"""`accel serve`: transformers' server over loopback, with the client of openai."""

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

import accel
from support.command_line import run_command
from support.everything import EVERYTHING
from support.llm.batching.serving import FOLDER, complete, end, manager_of, post, serving, settled, streamed

TEXTS = ["The", "It was", "Once upon a time there", "She said that", "Of all the people"]
CLIENTS = 64
openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.turns(2)
def test_completions_and_chats_are_those_of_the_model(server, stock):
    from accel.llm.batching.manager import BatchManager

    for text in TEXTS[:2]:
        assert complete(server, text) == streamed(server, text) == stock.answer(text, 8)
        given = {"model": FOLDER, "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
        chat = server.client.chat.completions.create(**given)
        parts = server.client.chat.completions.create(**given, stream=True)
        got = "".join(part.choices[0].delta.content or "" for part in parts)
        assert chat.choices[0].message.content == got == stock.chat(text, 8)
    (timed,) = server._model_manager.loaded_models.values()
    assert accel.report(timed.model).optimized and not accel.report(timed.model).fallbacks
    assert type(manager_of(server)) is BatchManager
    settled(server)


@pytest.mark.skipif(not EVERYTHING, reason="seconds of work; ACCEL_TEST_EVERYTHING=1 runs it")
def test_many_clients_at_once(server, stock):
    """More than there is memory for: some wait, and none is lost."""
    wanted = {(text, most): stock.answer(text, most) for text in TEXTS for most in (3, 16)}
    jobs = [(TEXTS[n % 5], (3, 16)[n % 3 == 0], n % 2) for n in range(CLIENTS)]

    def client(job):
        text, most, stream = job
        return (streamed if stream else complete)(server, text, most)

    with ThreadPoolExecutor(CLIENTS) as pool:
        got = list(pool.map(client, jobs))
    assert got == [wanted[text, most] for text, most, _ in jobs]
    settled(server)


@pytest.mark.parametrize("stop", ["e", [" t", "zzz"]])
@pytest.mark.turns(2)
def test_an_answer_ends_at_a_stop_string(server, stock, stop):
    """As `generate()` ends it; the next request is not ended by it."""
    whole, wanted = stock.answer("The", 40), stock.answer("The", 40, stop=stop)
    assert 0 < len(wanted) < len(whole)
    given = {"model": FOLDER, "prompt": "The", "max_tokens": 40, "temperature": 0, "stop": stop}
    one = server.client.completions.create(**given).choices[0]
    assert (one.text, one.finish_reason) == (wanted, "stop")
    parts = [part.choices[0] for part in server.client.completions.create(**given, stream=True)]
    assert "".join(part.text or "" for part in parts) == wanted and parts[-1].finish_reason == "stop"
    assert complete(server, "The", 40) == whole
    settled(server)


def test_an_answer_that_is_cut_has_the_reason_length(server, stock):
    text = "The " * 510
    given = {"model": FOLDER, "prompt": text, "max_tokens": 40, "temperature": 0}
    one = server.client.completions.create(**given)
    room = 512 - one.usage.prompt_tokens + 1
    assert 0 < room < 40 and one.usage.completion_tokens == room and one.choices[0].finish_reason == "length"
    parts = [part.choices[0] for part in server.client.completions.create(**given, stream=True)]
    assert "".join(part.text or "" for part in parts) == one.choices[0].text and parts[-1].finish_reason == "length"


@pytest.mark.turns(2)
def test_requests_have_settings_of_their_own(server, stock):
    """The first request that ever came was greedy; in stock all others would be."""

    def drawn(seed):
        config = json.dumps({"do_sample": True, "temperature": 3.0, "max_new_tokens": 12, "top_k": 0})
        return complete(server, "The", 12, seed=seed, temperature=None, extra_body={"generation_config": config})

    with ThreadPoolExecutor(4) as pool:
        greedy = [pool.submit(complete, server, text) for text in TEXTS]
        seeds = [drawn(seed) for seed in (1, 2, 1)]
    assert [one.result() for one in greedy] == [stock.answer(text, 8) for text in TEXTS]
    assert seeds[0] == seeds[2] != seeds[1]


# -- clients that do what they should not ------------------------------------------------------------------------------


def test_clients_that_hang_up(server, stock):
    body = json.dumps({"model": FOLDER, "prompt": "The", "max_tokens": 480, "stream": True, "temperature": 0})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    for read in (0, 400):
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
                connection.sendall(f"{head}\r\n\r\n{body}".encode())
                if read:
                    connection.recv(read)
    assert complete(server, "The") == stock.answer("The", 8)
    settled(server)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 422),
        (b"[]", 422),
        (b'{"model": "X", "prompt": "The", "nonsense": 1}', 422),
        (b'{"model": "X", "prompt": "The", "temperature": NaN}', 400),
    ],
)
def test_malformed_requests(server, stock, body, status):
    assert post(server, "completions", body.replace(b"X", FOLDER.encode()))[0] == status
    assert complete(server, "The", 3) == stock.answer("The", 3)


BOTH = {
    "max_tokens": (-1, 0, "many", 2.5, [8], True, 10**30),
    "temperature": (-1, "hot", [], True),
    "top_p": (-0.1, 1.5, "all"),
    "n": (0, -1, 2, "one"),
    "seed": ("x", 1.5, 2**70),
    "frequency_penalty": (-1, -5, "much"),
    "stop": ("", [""], 5, ["a", 3], {}),
    "stream": ("yes",),
    "model": (5, []),
    "generation_config": ("{", "[]", 5, '{"max_new_tokens": -1}', '{"max_new_tokens": "x"}',
                          '{"do_sample": true, "temperature": -1}', '{"repetition_penalty": 0}'),
}  # fmt: skip
ONE = {"prompt": (5, ["a", "b"], {})}
CHAT = {
    "max_completion_tokens": (-1, "x"),
    "messages": ([], "hello", [{}], [5], [{"role": "user", "content": 5}], [{"role": "user", "content": [{}]}],
                 [{"role": "user", "content": [{"type": "text"}]}], [{"content": "no role"}]),
    "logit_bias": (5, {"x": 1}, {"5": "much"}, {"100000": 1}),
    "tools": (5, ["a"]),
    "chat_template_kwargs": (5,),
}  # fmt: skip
RESPONSES = {"max_output_tokens": (-1, "x"), "input": (5, [], ["a"], [{"role": 5}])}
WRONG = [
    (path, name, value)
    for path, fields in (("completions", BOTH | ONE), ("chat/completions", BOTH | CHAT), ("responses", RESPONSES))
    for name, values in fields.items()
    for value in values
]


@pytest.mark.share(1)
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
@pytest.mark.turns(2)
def test_what_makes_no_sense_is_refused_and_the_reason_names_it(server, stock, path):
    """Streamed or not; the server goes on."""
    words = {"completions": {"prompt": "The"}, "responses": {"input": "The"}}
    body = words.get(path, {"messages": [{"role": "user", "content": "The"}]}) | {"model": FOLDER}
    for name, value in ((name, value) for place, name, value in WRONG if place == path):
        for stream in (False, True):
            status, detail = post(server, path, body | {"stream": stream} | {name: value})
            shown = name if not isinstance(value, str) or name != "generation_config" else ""
            assert (status, shown in detail) == (400, True), (name, value, stream, status, detail)
    assert complete(server, "The", 3) == stock.answer("The", 3)
    settled(server)


@pytest.mark.parametrize("call", [complete, streamed])
def test_a_prompt_longer_than_the_model(server, stock, call):
    complete(server, "The", 1)
    with pytest.raises(openai.BadRequestError) as refused:
        call(server, "The " * 600)
    told = refused.value.response.json()["detail"]
    assert re.match(r"a prompt of 6\d\d tokens, where a request may come to 512", told)
    assert complete(server, "The", 3) == stock.answer("The", 3)
    settled(server)


@pytest.mark.turns(2)
def test_an_id_twice(server, stock):
    headers = {"extra_headers": {"x-request-id": "twice"}}
    first = server.client.completions.create(
        model=FOLDER, prompt="The", max_tokens=60, stream=True, temperature=0, **headers
    )
    begun = next(iter(first)).choices[0].text
    for call in (complete, streamed):
        with pytest.raises(openai.BadRequestError) as refused:
            call(server, "It", **headers)
        assert "under way" in refused.value.response.json()["detail"]
    assert begun + "".join(chunk.choices[0].text or "" for chunk in first) == stock.answer("The", 60)
    assert complete(server, "The", 3, **headers) == stock.answer("The", 3)
    settled(server)


# -- other ways to serve -----------------------------------------------------------------------------------------------


@pytest.mark.turns(2)
def test_without_continuous_batching(stock):
    from transformers.cli.serving import model_manager, utils

    from accel.commands.serving import optimized_serving

    before = model_manager.ModelManager, utils.CBGenerateManager
    with optimized_serving():
        server = serving()
        try:
            assert complete(server, "The") == streamed(server, "The") == stock.answer("The", 8)
            body = {"model": FOLDER, "prompt": "The"}
            for wrong in ({"max_tokens": -1}, {"stop": 5, "stream": True}, {"temperature": -1}, {"adapter": "x"}):
                status, detail = post(server, "completions", body | wrong)
                assert status == 400 and next(iter(wrong)) in detail
            assert complete(server, "The", 40, stop="e") == stock.answer("The", 40, stop="e")
            (timed,) = server._model_manager.loaded_models.values()
            assert accel.report(timed.model).optimized
        finally:
            end(server)
    assert (model_manager.ModelManager, utils.CBGenerateManager) == before


def test_the_command_takes_what_transformers_takes(monkeypatch):
    shown = run_command("serve", "--help")
    assert shown.exit_code == 0 and "--continuous-batching" in shown.output and "accel serve" in shown.output
    wrong = run_command("serve", "--nonsense")
    assert wrong.exit_code == 2 and "nonsense" in wrong.output
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    absent = run_command("serve", FOLDER)
    assert absent.exit_code == 1 and "pip install 'hf-accel[serve]'" in absent.output


def test_a_model_that_cannot_be_optimized_is_served_as_it_is(monkeypatch):
    from accel.commands.serving import OptimizedModels

    monkeypatch.setattr(accel, "optimize", lambda model: 1 / 0)
    models = OptimizedModels(device="cpu")
    model, _ = models.load_model_and_processor(f"{FOLDER}@main")
    models.shutdown()
    assert not accel.report(model).optimized
