"""Pairs of models on a GPU, a talk with them, and which of their graphs are replayed."""

import copy
import inspect
import threading
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import DynamicCache

import accel
from accel.bench.llm.models import spread
from accel.llm.pipeline.forward import SpreadForward
from support.llm.families import layers, make, prompt
from support.together import together

CARDS = [cards for cards in (2, 4) if torch.cuda.device_count() >= cards]
DEEP = ("llama", "gpt-neox", "mixtral", "qwen3", "phi3")  # spread with four layers; others with two


def new_pair(name: str, dtype: torch.dtype = torch.float32, **changes):
    """(optimized, stock)."""
    stock = make(name, **changes).to("cuda", dtype)
    return accel.optimize(copy.deepcopy(stock), graphs=True), stock


def pair_over(cards: int, name: str = "llama", dtype: torch.dtype = torch.float32, tied: bool = False, **options):
    """(optimized, stock), both spread over so many cards, or as many as there are layers. tied: the head, to the
    embeddings, on whose card it then is.
    """
    changes = {"num_hidden_layers": 4} if name in DEEP else {}
    one = make(name, dtype, **changes, **({"tie_word_embeddings": True} if tied else {}))
    cards = min(cards, len(layers(one)))
    stock, ours = (spread(copy.deepcopy(one), cards) for _ in range(2))
    return accel.optimize(ours, graphs=True, **options), stock


def forward_over(model) -> SpreadForward:
    """That of a model over several cards."""
    found = vars(model)["forward"]
    assert type(found) is SpreadForward, accel.report(model)
    return found


def stretches_replayed(model) -> set[str]:
    return {row["path"] for row in replayed(model)}


def on_gpu(*tensors):
    return tuple(None if tensor is None else tensor.cuda() for tensor in tensors)


def replayed(model) -> list[dict]:
    return [row for row in accel.report(model).graphs if row["status"] == "graph"]


def decode_graphs(model) -> list[dict]:
    """Rows of the report for decode steps that are replayed."""
    return [row for row in replayed(model) if "prompt" not in row["inputs"].split(", ")]


def prefill_graphs(model) -> list[dict]:
    """Rows of the report for prompts that are replayed."""
    return [row for row in replayed(model) if "prompt" in row["inputs"].split(", ")]


def talk(model, ids, mask=None, steps: int = 3) -> dict:
    """Logits of a prompt's last token and of given words after it."""
    cache, found = DynamicCache(config=model.config), {}
    takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
    mask = torch.ones_like(ids) if mask is None else mask
    for step in range(steps + 1):
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        given = {"position_ids": positions} if takes_positions else {}
        output = model(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1, **given)
        found[f"{step}"] = output.logits
        ids = prompt(len(ids), 1, 40 + step).to(ids.device)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    return found


# What a criterion or a streamer may do to the model while it writes.
EDITS = {
    "weights": lambda model: model.model.layers[1].mlp.down_proj.weight.mul_(-1.5),
    "a new weight": lambda model: setattr(
        model.model.norm, "weight", nn.Parameter(model.model.norm.weight.flip(0), requires_grad=False)
    ),
    "a hook": lambda model: model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"input_ids": (kwargs["input_ids"] + 3) % 50}), with_kwargs=True
    ),
    "a hook inside": lambda model: model.model.layers[0].register_forward_hook(
        lambda module, args, output: output * 1.5 if torch.is_tensor(output) else output
    ),
    "training": lambda model: model.train(),
}


def on_a_stream(call: Callable):
    """What the call gives on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = call()
    torch.cuda.current_stream().wait_stream(stream)
    return got


def side_by_side(call: Callable, jobs: Sequence, times: int = 5) -> list[list]:
    """What each job gives, each in a thread and on a stream of its own, so many times."""
    torch.cuda.synchronize()
    got: dict[int, list] = {}
    start = threading.Barrier(len(jobs))

    def work(number):
        start.wait()
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            got[number] = [call(jobs[number]) for _ in range(times)]
            torch.cuda.current_stream().synchronize()

    together(work, ((number,) for number in range(len(jobs))))
    return [got[number] for number in range(len(jobs))]


def memory_stays_flat(model, times: int) -> None:
    """Of texts that end early, so that steps are begun in vain and stores die while one is on its way."""
    ids = prompt(1, 6).cuda()
    end = int(model.generate(ids, max_new_tokens=5, do_sample=False)[0, -1])
    used = []
    for _ in range(times):
        model.generate(ids, max_new_tokens=64, do_sample=False, eos_token_id=end, pad_token_id=0)
        torch.cuda.synchronize()
        # Blocks that another stream has used come back when it is done: how many wait at a time, and so whether they
        # take a segment more, depends on how busy the GPU is. What is kept for good is left when the cache is emptied.
        torch.cuda.empty_cache()
        used.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert used[10][0] >= used[-1][0] and used[10][1] >= used[-1][1], (used[10], used[-1])
