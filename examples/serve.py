"""A server and its clients: transformers' own server with an optimized model, asked by many at once.

Run from the root of a checkout, with `pip install 'hf-accel[serve]'`.
"""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.error import URLError
from urllib.request import urlopen

from openai import OpenAI

MODEL = sys.argv[1] if len(sys.argv) > 1 else "examples/models/tiny-lm"  # or the model you serve
PORT = sys.argv[2] if len(sys.argv) > 2 else "8123"
command = ["-m", "accel", "serve", MODEL, "--continuous-batching", "--port", PORT, "--cb-num-blocks", "64"]
server = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
try:
    for _ in range(600):  # the server is ready once the model is loaded
        try:
            urlopen(f"http://localhost:{PORT}/health")
            break
        except URLError:
            time.sleep(0.2)

    client = OpenAI(base_url=f"http://localhost:{PORT}/v1", api_key="none")

    def ask(question: str) -> str:
        said = [{"role": "user", "content": question}]
        answer = client.chat.completions.create(model=MODEL, messages=said, max_tokens=20, temperature=0, stream=True)
        return "".join(part.choices[0].delta.content or "" for part in answer if part.choices)

    with ThreadPoolExecutor(16) as clients:
        for answer in clients.map(ask, [f"Who is the {number}th gentleman?" for number in range(16)]):
            print(answer)
finally:
    server.terminate()
    server.wait()
