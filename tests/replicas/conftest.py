"""Two replicas of the shipped model in this process, behind a front, and ways to lose one."""

import asyncio
import socket
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig

FOLDER = str(Path(__file__).parents[2] / "examples" / "models" / "tiny-lm")


class Lost(Exception):
    """What an engine raises where a replica is gone."""


class Pool:
    """Hands questions to replicas in turn. lose: how many of the next answers are cut off; after: how many pieces."""

    def __init__(self, replicas):
        self.replicas, self.asked, self.cut = replicas, [], 0
        self.lose, self.after = 0, 0

    async def __call__(self, question):
        self.asked.append(question)
        answer = self.replicas[len(self.asked) % len(self.replicas)].answer(question)
        lost, self.lose = self.lose > 0, self.lose - 1
        count = 0
        async for piece in answer:
            if lost and count == self.after:
                await answer.aclose()
                self.cut += 1
                raise Lost("the process is gone")
            yield piece
            count += 1


@pytest.fixture(scope="module")
def replicas():
    pytest.importorskip("fastapi")
    from accel.replicas.replica import Replica

    made = [Replica(FOLDER, batching=ContinuousBatchingConfig(num_blocks=4), device="cpu") for _ in range(2)]
    yield made
    for one in made:
        one.close()


@pytest.fixture
def pool(replicas):
    return Pool(replicas)


@pytest.fixture
def front(pool):
    """Over HTTP on this machine, with a client."""
    openai = pytest.importorskip("openai")
    pytest.importorskip("uvicorn")
    from transformers.cli.serve import Serve

    from accel.replicas.front import Front

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    made = Front(FOLDER, pool, lost=[Lost], host="127.0.0.1", port=port, log_level="error")
    Serve.start_server(made)
    until = time.monotonic() + 30
    while not made.server.started and time.monotonic() < until:
        time.sleep(0.02)
    made.client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
    yield made
    made.client.close()
    made.kill_server()
    made.server.force_exit = made._thread.is_alive()  # it waits for connections that a failed test left open
    made.close()


@pytest.fixture(scope="session")
def stock():
    """What the model writes by itself, greedily."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(FOLDER).eval(), AutoTokenizer.from_pretrained(FOLDER)

    def answer(text, most):
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=most, do_sample=False)
        return out[0, ids.shape[1] :].tolist()

    answer.tokenizer = tokenizer
    return answer


@pytest.fixture
def within():
    """Runs a coroutine, for a minute at most."""
    return lambda coroutine: asyncio.run(asyncio.wait_for(coroutine, 60))
