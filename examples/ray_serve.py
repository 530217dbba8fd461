"""Replicas of an optimized model behind one server, by Ray Serve: one that dies is made anew, and no request is lost.

Run from the root of a checkout, with `pip install 'hf-accel[ray]'`; on many hosts after `ray start` on each of them.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from openai import OpenAI
from ray import serve
from ray.exceptions import RayActorError

from accel.replicas.front import Front
from accel.replicas.replica import Replica

MODEL, REPLICAS, PORT, *_ = [*sys.argv[1:], *("examples/models/tiny-lm", "2", "8123")[len(sys.argv) - 1 :]]
each = {"num_gpus": 1 if torch.cuda.is_available() else 0, "num_cpus": 0.5}  # a replica sees its own card alone


def front():
    handle = serve.get_deployment_handle("Replica", app_name="accel").options(stream=True)
    return Front(MODEL, handle.answer.remote, lost=[RayActorError]).app


replicas = serve.deployment(Replica, ray_actor_options=each, num_replicas=int(REPLICAS), max_ongoing_requests=1024)
server = serve.deployment(serve.ingress(front)(), name="Front", max_ongoing_requests=4096)
serve.start(http_options={"port": int(PORT)})
serve.run(server.bind(replicas.bind(MODEL)), name="accel")

client = OpenAI(base_url=f"http://localhost:{PORT}/v1", api_key="none")
said = [[{"role": "user", "content": f"Who is the {number}th gentleman?"}] for number in range(16)]
with ThreadPoolExecutor(16) as clients:
    given = {"model": MODEL, "max_tokens": 20, "temperature": 0}
    for answer in clients.map(lambda one: client.chat.completions.create(messages=one, **given), said):
        print(answer.choices[0].message.content)
serve.shutdown()
