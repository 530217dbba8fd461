"""`accel serve` over loopback, with the client of openai."""

import json
import socket
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from support.llm.kv_cache.blocks import check_blocks

FOLDER = str(Path(__file__).parents[4] / "examples" / "models" / "tiny-lm")
BLOCKS = 2  # of 256 tokens: less than the clients want at once


def serving(**given):
    import openai
    from transformers.cli.serve import Serve

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"device": "cpu", "dtype": "float32", "host": "127.0.0.1", "log_level": "error", "non_blocking": True}
    server = Serve(force_model=FOLDER, port=port, **common, **given)
    until = time.monotonic() + 30
    while not server.server.started and time.monotonic() < until:
        time.sleep(0.02)
    server.port, server.state = port, server._generation_state
    url = f"http://127.0.0.1:{port}/v1"
    server.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
    return server


def end(server):
    server.client.close()
    server.kill_server()
    server.server.force_exit = server._thread.is_alive()  # it waits for connections that a failed test left open


def manager_of(server):
    return server.state._cb_manager._cb.manager


def settled(server):
    """Once nothing is under way: every page has come back."""
    manager, until = manager_of(server), time.monotonic() + 20
    while (manager._results.under_way() or manager.engine.busy) and time.monotonic() < until:
        time.sleep(0.01)
    assert not manager._results.under_way() and not manager._results._handlers
    with manager.pause():
        allocator = manager.engine.allocator
        check_blocks(allocator)
        assert allocator.free == allocator.blocks - 1


def complete(server, text, most=8, **given):
    given = {"temperature": 0} | given
    return server.client.completions.create(model=FOLDER, prompt=text, max_tokens=most, **given).choices[0].text


def streamed(server, text, most=8, **given):
    given = {"temperature": 0} | given
    chunks = list(server.client.completions.create(model=FOLDER, prompt=text, max_tokens=most, stream=True, **given))
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")
    return "".join(chunk.choices[0].text or "" for chunk in chunks)


def post(server, path, body):
    """Status and detail; body: bytes, or what is to be JSON."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = f"http://127.0.0.1:{server.port}/v1/{path}"
    try:
        return urlopen(Request(url, body, {"Content-Type": "application/json"}), timeout=20).status, ""
    except HTTPError as error:
        return error.code, error.read().decode()
