"""`generate_batch` of one language model: correctness first, then workloads, stock beside accel in turns."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import accel
from accel.bench.llm import quantized
from accel.bench.llm.configs import CONFIGS
from accel.bench.llm.models import beside, build
from accel.bench.llm.runner import BenchRequest
from accel.bench.llm.workloads import WORKLOADS, Workload
from accel.bench.machine import provenance
from accel.bench.memory import release
from accel.bench.results import BenchRecord, WrongResult
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


@dataclass(frozen=True)
class BatchRequest:
    """What to measure. workloads: names; stock_seconds: about how long stock may take at each, which is then given
    fewer requests and new tokens; lossy: (weights, kv_cache) to measure beside, or None.
    """

    model: str
    device: torch.device
    dtype: torch.dtype
    workloads: tuple[str, ...] = tuple(one.name for one in WORKLOADS)
    stock_seconds: float = 20.0
    seconds: float = 500.0
    lossy: tuple[str, str] | None = ("int8", "int8")
    most_tokens: int | None = None

    @property
    def chosen(self) -> list[Workload]:
        named = [one for one in WORKLOADS if one.name in self.workloads]
        return named if self.most_tokens is None else [one.scaled(self.most_tokens) for one in named]


def bench_batches(
    request: BatchRequest,
    stage: Callable[[str], None] = lambda name: None,
    keep: Callable[[dict], object] = lambda result: None,
) -> dict:
    """The result as one dict, ready for JSON. keep: is given it as it grows.

    Raises WrongResult before any figure, KeyError, ValueError or TypeError for a model that cannot be made.
    """
    device = request.device
    stage("building")
    model = build(request.model, device, request.dtype)
    name = BenchRequest(request.model, device, request.dtype).name
    about = {
        "case": f"batch-{name}",
        "about": f"generate_batch() of {name}, {'random' if request.model in CONFIGS else 'saved'} weights",
        **provenance(device, request.dtype),
        "attention": model.config._attn_implementation,
    }
    going = BenchRecord(about, {"rows": []}, request.seconds, keep)
    with torch.no_grad():
        stock = beside(model)
        accel.optimize(model)
        stage("correctness")
        going.about |= checked_tokens(model, stock)
        variants: dict[str, Any] = {"stock": stock, "accel": model}
        if request.lossy is not None:
            weights, kv_cache = request.lossy
            stage(f"quantizing to {weights}, kv {kv_cache}")
            options = {"weights": weights, "kv_cache": kv_cache}
            try:
                one, lost = quantized.variant(stock, f"{weights}, kv {kv_cache}", options, device)
                variants[one.name], going.about["quantized"] = one.model, lost
            except Exception as error:  # one that cannot be made must not cost the others' figures
                going.fail(error, case="quantizing")
        rows: dict[str, dict[str, Any]] = {workload.name: dict(workload.about) for workload in request.chosen}
        lossy = [name for name in variants if name not in ("stock", "accel")]
        for names in (["stock", "accel"], *([name] for name in lossy)):
            for workload in request.chosen:  # the lossy ones last: should time run out, the others are there
                stage(f"{workload.name}: {' and '.join(names)}")
                _measure(request, going, workload, {name: variants[name] for name in names}, rows[workload.name])
        stage("memory and set-up")
        for label, one in variants.items():
            if label != "stock":
                going.about.setdefault("calls", {})[label] = _calls(one, device)
    report = accel.report(model).to_dict()
    going.about |= {"graphs": report["graphs"], "fallbacks": report["fallbacks"]}
    going.save()
    return going.result


def answers(model: "PreTrainedModel", prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """What `generate_batch` adds to each prompt, greedily. Raises ValueError where a request failed or stopped."""
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # Stock's pool takes most of the memory there is, which a CPU's owner wants for other things.
    sized = ContinuousBatchingConfig(**ON_CPU) if model.device.type == "cpu" else None
    asked = [list(prompt) for prompt in prompts]
    outputs = list(model.generate_batch(asked, generation_config=config, continuous_batching_config=sized).values())
    failed = next((one for one in outputs if one.error is not None), None)
    if failed is not None:
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


def _measure(
    request: BatchRequest, going: BenchRecord, workload: Workload, variants: dict[str, Any], row: dict[str, Any]
) -> None:
    """Into a row: stock once, as much as it does in its time; accel's first call, and the median of more."""
    for name, model in variants.items():
        if not going.in_time(case=f"{workload.name}: {name}"):
            continue
        try:
            row[name] = _stock(request, workload, model) if name == "stock" else _timed(request, workload, model)
            going.add("rows", row)
        except Exception as error:  # what one way of running it raises, the others have figures of their own
            going.fail(error, case=f"{workload.name}: {name}")
        release(request.device)


def _stock(request: BatchRequest, workload: Workload, model: Any) -> dict:
    """Tokens a second of stock's steps, without its set-up and its prompts: of so many of the first requests at once as
    it reads in seconds, and as many new tokens of each as fit the time.
    """
    mean = (workload.shortest + workload.longest) / 2
    whole = workload.first(max(4, int(STOCK_TOKENS / mean)))
    few = [_seconds(whole.answering(new), model, request.device) for new in FEW]
    step = max((few[1] - few[0]) / (FEW[1] - FEW[0]), 1e-4)
    whole = whole.answering(max(FEW[1], int((request.stock_seconds - few[0]) / step)))
    taken = _seconds(whole, model, request.device)
    more = whole.new - FEW[0]
    # Where its steps are lost in the noise of its set-up, or there is one alone, the set-up is counted too.
    step = (taken - few[0]) / more if more > 0 and taken > few[0] else taken / whole.new
    return {
        "s": round(taken, 4), "step_ms": round(1e3 * step, 3), "tok_s": round(whole.requests / step, 1),
        "requests": whole.requests, "new tokens": whole.new,
    }  # fmt: skip


def _timed(request: BatchRequest, workload: Workload, model: Any) -> dict:
    on_gpu, turn = request.device.type == "cuda", partial(_seconds, workload, model, request.device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(request.device)
    first, rounds = turn(), take_turns({"": turn}, least=1, most=ROUNDS, clock=Clock(LONGEST))
    peak = round(torch.cuda.max_memory_allocated(request.device) / 2**20) if on_gpu else None
    return _figures(workload, rounds[""]) | {"first_s": round(first, 3), "peak_mb": peak}


def _seconds(workload: Workload, model: Any, device: torch.device) -> float:
    prompts = workload.prompts(model)
    return seconds(partial(answers, model, prompts, workload.new), device)


def _figures(workload: Workload, times: list[float]) -> dict:
    median = statistics.median(times)
    return {"s": round(median, 4), "tok_s": round(workload.requests * workload.new / median, 1), "rounds": len(times)}


def _calls(model: Any, device: torch.device) -> dict:
    """What a call costs besides its tokens, once the model is warm: one request of one token; and what many leave."""
    one = Workload("one", 1, 20, 20, 1)
    once = [_seconds(one, model, device) for _ in range(4)]
    for _ in range(WARM):  # a shape's graph is captured when it comes again
        _seconds(SMALL, model, device)
    release(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    for _ in range(CALLS):
        _seconds(SMALL, model, device)
    release(device)
    after = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return {
        "one_token_ms": round(1e3 * statistics.median(once[1:]), 2),
        "grown_mb": round((after - before) / 2**20, 2),
        "calls": CALLS,
    }
