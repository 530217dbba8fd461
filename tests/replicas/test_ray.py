"""Replicas under Ray Serve: each a process of its own, one of which is killed while it answers."""

import asyncio
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="needs ray: make test-ray")
serve = pytest.importorskip("ray.serve")
openai = pytest.importorskip("openai")

ROOT = Path(__file__).parents[2]
FOLDER, TEXTS, MOST = str(ROOT / "examples" / "models" / "tiny-lm"), ["The", "It was", "She said that"], 160


def deploy(folder, log):
    """Two replicas that note who has answered how many tokens, at a pace at which one can be killed meanwhile."""
    from ray.exceptions import RayActorError

    from accel.replicas.front import Front
    from accel.replicas.replica import Replica

    class Noting(Replica):
        async def answer(self, question):
            Path(log, f"{os.getpid()}-{time.monotonic_ns()}").write_text(str(len(question.generated)))
            async for piece in super().answer(question):
                await asyncio.sleep(0.02)
                yield piece

    def front():
        handle = serve.get_deployment_handle("Noting", app_name="tested").options(stream=True)
        return Front(folder, handle.answer.remote, lost=[RayActorError], log_level="error").app

    each = {"num_cpus": 0.5}
    noting = serve.deployment(Noting, num_replicas=2, max_ongoing_requests=64, ray_actor_options=each)
    server = serve.deployment(serve.ingress(front)(), name="Front", max_ongoing_requests=64, ray_actor_options=each)
    serve.run(server.bind(noting.bind(folder, device="cpu")), name="tested")


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A client, and the folder of what was noted."""
    log = tmp_path_factory.mktemp("answered")
    environment = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels"))), "HF_HUB_OFFLINE": "1"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    try:
        serve.start(http_options={"port": port})
        deploy(FOLDER, str(log))
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120), log
    finally:
        serve.shutdown()
        ray.shutdown()


def answered(log):
    """By process: how many tokens each answer had when it came there."""
    found = {}
    for path in sorted(log.iterdir()):
        found.setdefault(int(path.name.partition("-")[0]), []).append(int(path.read_text()))
        path.unlink()
    return found


def ask(client, text, stream):
    given = {"model": FOLDER, "prompt": text, "max_tokens": MOST, "temperature": 0, "stream": stream}
    found = client.completions.create(**given)
    return "".join(one.choices[0].text or "" for one in found) if stream else found.choices[0].text


def test_a_replica_is_killed_and_no_request_is_lost(running, stock):
    """Requests are spread over both; those in flight on the killed one are answered, and it comes back."""
    client, log = running
    wanted = [stock.tokenizer.decode(stock(text, MOST), skip_special_tokens=True) for text in TEXTS]
    jobs = [(text, stream) for text in TEXTS for stream in (True, False)] * 2
    with ThreadPoolExecutor(len(jobs)) as clients:
        found = [clients.submit(ask, client, *job) for job in jobs]
        until = time.monotonic() + 60
        while len(list(log.iterdir())) < len(jobs) and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.5)  # some of their tokens have come
        first = answered(log)
        assert len(first) == 2 and sum(map(len, first.values())) == len(jobs) and not any(map(sum, first.values()))
        assert not any(one.done() for one in found)
        killed, left = first
        os.kill(killed, signal.SIGKILL)
        got = [one.result() for one in found]
    assert got == [wanted[TEXTS.index(text)] for text, _ in jobs]
    again = [begun for begins in answered(log).values() for begun in begins]
    assert len(again) == len(first[killed]) and max(again) > 0  # streams went on behind what was sent

    until = time.monotonic() + 90
    while time.monotonic() < until:  # a new one comes, and takes requests too
        with ThreadPoolExecutor(8) as clients:
            got = list(clients.map(lambda text: ask(client, text, False), TEXTS * 3))
        assert got == wanted * 3
        both = answered(log)
        if len(both.keys() - {killed}) == 2:
            break
    assert killed not in both and left in both and len(both) == 2
