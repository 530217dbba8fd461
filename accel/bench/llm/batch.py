"""`generate_batch` of one language model: correctness first, then workloads, stock beside accel."""

import statistics
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import accel
from accel.bench.llm.request import BatchRequest
from accel.bench.llm.runner import ModelRun
from accel.bench.llm.variants import Variant
from accel.bench.llm.workloads import WORKLOADS, Workload
from accel.bench.memory import allocated_bytes
from accel.bench.results import WrongResult
from accel.bench.timing import Clock, seconds, take_turns
from accel.tolerances import LOGITS, bound

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHECKED = (8, 24)  # requests and tokens of an answer that are checked
ROUNDS = 3  # of each workload by accel; what stock does in one call is enough
LONGEST = 20.0  # seconds after which no further round of a workload is begun, beyond the first after its first call
STOCK_TOKENS = 36_000  # of prompts that stock is given at once: a hundred requests and more, of short ones
FEW = (1, 5)  # new tokens of calls that tell how long a step of stock takes
SMALL = Workload("small", 8, 20, 60, 8)
ON_CPU = {"num_blocks": 64, "max_batch_tokens": 256}
WARM, CALLS = 4, 20  # calls of the small one: before, and in which memory must not grow


@torch.no_grad()
def bench_batches(request: BatchRequest, *args: Any) -> dict:
    """The result as one dict, ready for JSON. args: device, dtype, stage, keep, see `ModelRun`.

    Raises WrongResult before any figure, and what `ModelRun` raises for a model that cannot be made.
    """
    run = ModelRun(request, request.seconds, *args)
    about = f"generate_batch() of {request.name}, {request.filled}"
    run.about = {"case": f"batch-{request.name}", "about": about} | run.about
    run.about["attention"] = run.model.config._attn_implementation
    run.body["rows"] = []
    accel.optimize(run.model)
    run.stage("correctness")
    run.about |= checked_tokens(run.model, run.stock)
    if request.lossy:
        weights, kv_cache = request.lossy
        run.add_lossy([(f"{weights}, kv {kv_cache}", {"weights": weights, "kv_cache": kv_cache})])
    chosen = [one for one in WORKLOADS if one.name in request.workloads]
    if request.most_tokens is not None:
        chosen = [one.scaled(request.most_tokens) for one in chosen]
    rows: dict[str, dict[str, Any]] = {workload.name: dict(workload.about) for workload in chosen}
    for variants in (run.variants[:2], run.variants[2:]):  # should time run out, the plain ones are there
        for workload in chosen:
            for variant in variants:
                run.stage(f"{workload.name}: {variant.name}")
                _measure(run, workload, variant, rows[workload.name], request.stock_seconds)
    run.stage("memory and set-up")
    run.about["calls"] = {one.name: _calls(one.model, run.device) for one in run.variants[1:]}
    run.report()
    run.save()
    return run.result


def answers(model: "PreTrainedModel", prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """What `generate_batch` adds to each prompt, greedily. Raises ValueError where a request failed or stopped."""
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # Stock's pool takes most of the memory there is, which a CPU's owner wants for other things.
    sized = ContinuousBatchingConfig(**ON_CPU) if model.device.type == "cpu" else None
    asked = [list(prompt) for prompt in prompts]
    outputs = list(model.generate_batch(asked, generation_config=config, continuous_batching_config=sized).values())
    if (failed := next((one for one in outputs if one.error is not None), None)) is not None:
        raise ValueError(f"request {failed.request_id} failed: {failed.error}")
    found = [one.generated_tokens for one in outputs]
    short = next((len(one) for one in found if len(one) != new), None)
    if short is not None or len(outputs) != len(prompts):
        raise ValueError(f"{len(outputs)} answers of {len(prompts)}, one of {short} tokens instead of {new}")
    return found


def checked_tokens(model: "PreTrainedModel", stock: "PreTrainedModel") -> dict:
    """Every token that accel chose is the best one to stock too, given those before it, but for rounding.

    Raises WrongResult where one is not.
    """
    requests, new = CHECKED
    most = stock.config.get_text_config().max_position_embeddings or 512
    prompts = WORKLOADS[0].first(requests).scaled(most).prompts(stock)
    worst = 0.0
    for prompt, answer in zip(prompts, answers(model, prompts, new), strict=True):
        ids = torch.tensor([[*prompt, *answer]], device=stock.device)
        logits = stock(ids).logits[0, len(prompt) - 1 : -1].double()
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        spread = (logits - logits.mean(-1, keepdim=True)).square().mean(-1).sqrt()
        worst = max(worst, float(((logits.amax(-1) - chosen) / spread).max()))
    allowed = 2 * bound(LOGITS, stock.dtype)
    if not worst <= allowed:
        raise WrongResult(f"a token that accel chose is {worst:.2g} standard deviations below stock's best one")
    return {"worst_margin": worst, "margin_allowed": allowed}


def _measure(run: ModelRun, workload: Workload, variant: Variant, row: dict[str, Any], stock_seconds: float) -> None:
    """Into a row: stock once, as much as it does in its time; accel's first call, and the median of more."""
    case = f"{workload.name}: {variant.name}"
    if not run.in_time(case=case):
        return
    measure = partial(_stock, stock_seconds) if variant.name == "stock" else timed
    try:
        row[variant.name] = measure(workload, variant.model, run.device)
        run.add("rows", row)
    except Exception as error:  # what one way of running it raises, the others have figures of their own
        run.fail(error, case=case)
    run.release()


def _stock(most_s: float, workload: Workload, model: Any, device: torch.device) -> dict:
    """Tokens a second of stock's steps, without its set-up and its prompts: of so many of the first requests at once as
    it reads in seconds, and as many new tokens of each as fit the time.
    """
    mean = (workload.shortest + workload.longest) / 2
    whole = workload.first(max(4, int(STOCK_TOKENS / mean)))
    few = [_seconds(whole.answering(new), model, device) for new in FEW]
    step = max((few[1] - few[0]) / (FEW[1] - FEW[0]), 1e-4)
    whole = whole.answering(max(FEW[1], int((most_s - few[0]) / step)))
    taken = _seconds(whole, model, device)
    more = whole.new - FEW[0]
    # Where its steps are lost in the noise of its set-up, or there is one alone, the set-up is counted too.
    step = (taken - few[0]) / more if more > 0 and taken > few[0] else taken / whole.new
    told = {"s": round(taken, 4), "step_ms": round(1e3 * step, 3), "tok_s": round(whole.requests / step, 1)}
    return told | {"requests": whole.requests, "new tokens": whole.new}


def timed(workload: Workload, model: Any, device: torch.device) -> dict:
    """The first call, and tokens a second by the median of more."""
    on_gpu, turn = device.type == "cuda", partial(_seconds, workload, model, device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    first, rounds = turn(), take_turns({"": turn}, least=1, most=ROUNDS, clock=Clock(LONGEST))[""]
    median = statistics.median(rounds)
    return {
        "s": round(median, 4),
        "tok_s": round(workload.requests * workload.new / median, 1),
        "rounds": len(rounds),
        "first_s": round(first, 3),
        "peak_mb": round(torch.cuda.max_memory_allocated(device) / 2**20) if on_gpu else None,
    }


def _seconds(workload: Workload, model: Any, device: torch.device) -> float:
    prompts = workload.prompts(model)
    return seconds(partial(answers, model, prompts, workload.new), device)


def _calls(model: Any, device: torch.device) -> dict:
    """What a call costs besides its tokens, once the model is warm: one request of one token; and what many leave."""
    one = Workload("one", 1, 20, 20, 1)
    once = [_seconds(one, model, device) for _ in range(4)]
    for _ in range(WARM):  # a shape's graph is captured when it comes again
        _seconds(SMALL, model, device)
    before = allocated_bytes(device)
    for _ in range(CALLS):
        _seconds(SMALL, model, device)
    grown = allocated_bytes(device) - before
    return {
        "one_token_ms": round(1e3 * statistics.median(once[1:]), 2),
        "grown_mb": round(grown / 2**20, 2),
        "calls": CALLS,
    }
