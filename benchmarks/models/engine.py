"""Python of one step of the batching engine, by the requests that run: milliseconds of processor time, one thread.

The model and the draw are left out: a step plans, makes all numbers of its launch, reads the tokens of the step before
and does what follows of them. `decode`: all requests write. `mixed`: a prompt of 512 tokens comes in every step, and a
request ends. Medians of many steps.
"""

import statistics
import time
from itertools import count
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import accel
from accel.llm.batching import step as steps
from accel.llm.batching.engine import Engine
from accel.llm.batching.limits import Limits
from accel.llm.batching.request import Request
from accel.llm.batching.sampling import Sampling
from benchmarks.study import Study, numbers

STEPS, PROMPT, CONTEXT = 200, 512, 2048
SIZES = dict(vocab_size=99, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)


def launch(runner: steps.StepRunner, plan, tokens_of, logprobs: bool, check: bool = True) -> steps.LaunchedStep:
    """In place of the method: all but the model and the draw."""
    size = steps.StepSize.filled(plan, runner.rows) or steps.StepSize.exact(plan)
    numbers = steps.StepInputs(plan, size, runner.rows)
    numbers.int64_on(runner.device), numbers.int32_on(runner.device)
    return steps.LaunchedStep(plan, torch.from_numpy(np.full(len(plan.draw_rows), 7)), None, None)


def engine_with(requests: int) -> Engine:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=CONTEXT)).eval()
    forward = vars(accel.optimize(model, cpu="fuse"))["forward"]
    pages = (requests + 8) * CONTEXT // 64
    return Engine(forward, Limits(rows=requests, tokens=2 * PROMPT, context=CONTEXT, blocks=pages))


def milliseconds(engine: Engine, requests: int, mixed: bool) -> float:
    generator, ids = torch.Generator().manual_seed(0), count()

    def one(new: int) -> Request:
        prompt = torch.randint(99, (PROMPT,), generator=generator).tolist()
        return Request(f"request {next(ids)}", prompt, new, frozenset({3}), Sampling())

    for number in range(requests):
        engine.add(one(STEPS + 50 + number if mixed else CONTEXT - PROMPT))
    while engine.scheduler.waiting:
        engine.step()
    times = []
    for _ in range(STEPS):
        if mixed:
            engine.cancel(next(iter(engine.rows.requests.values())).id)
            engine.add(one(CONTEXT - PROMPT))
        start = time.thread_time()
        engine.step()
        times.append(time.thread_time() - start)
    return round(1e3 * statistics.median(times), 4)


def main(out: Path, requests: str = "1,64,256,512,1024") -> None:
    torch.set_num_threads(1)
    record = Study("engine-steps", out, "Python of a step, milliseconds of processor time", ms=[])
    with mock.patch.object(steps.StepRunner, "launch", launch):
        for many in numbers(requests):
            times = {way: milliseconds(engine_with(many), many, way == "mixed") for way in ("decode", "mixed")}
            record.add("ms", {"requests": many} | times)
