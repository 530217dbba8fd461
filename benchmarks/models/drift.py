"""How far logits of tiny models are off after thousands of tokens, stock and accel, against float64: do states drift?

Two texts: most of it as one prompt, then single tokens; and nearly all of it as single tokens. Routers choose in every
run what they chose in float64.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, DynamicCache

import accel
from accel.bench.llm.tiny import SPECIAL, VOCABULARY, build_tiny
from accel.libraries.cache import cache_given
from accel.llm.generation.routing import noting, repeating
from benchmarks.study import Study, words

FAMILIES = "qwen3_5_text,bamba,mamba2,kimi_linear,lfm2,falcon_mamba"
BEHIND, PARTS = 64, 4  # single tokens behind a prompt; places of a text where errors are told


def main(
    out: Path,
    types: Annotated[str, typer.Option(help="model types, with commas")] = FAMILIES,
    tokens: int = 4096,
    dtype: str = "bfloat16",
    seeds: Annotated[int, typer.Option(help="texts of each kind")] = 1,
    ways: str = "prompt,steps",
) -> None:
    """Relative errors (root mean square) of logits at places of the text, stock's and ours, and their ratio."""
    torch.set_num_threads(1)
    study = Study("drift", out, dtype=getattr(torch, dtype), rows=[], tokens=tokens)
    for name in words(types):
        with study.attempt(type=name):
            stock, ours, exact = models(name, getattr(torch, dtype))
            for way in words(ways):
                for seed in range(seeds):
                    row = drifted(stock, ours, exact, tokens, way, seed)
                    row["fallbacks"] = list(accel.report(ours).fallbacks)
                    study.add("rows", {"type": name, "dtype": dtype, "way": way, "seed": seed} | row)


def models(name: str, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Stock, optimized and in float64, of the same weights."""
    stock = build_tiny(MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[name]]).requires_grad_(False).to(dtype)
    ours = copy.deepcopy(stock)
    accel.optimize(ours, cpu="fuse")
    exact = copy.deepcopy(stock).double()
    exact.set_experts_implementation("eager")  # others take no float64
    return stock, ours, exact


@contextmanager
def in_float64() -> Iterator[None]:
    """Inside, code that asks for float32 gets float64."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


def drifted(stock: Any, ours: Any, exact: Any, tokens: int, way: str, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(SPECIAL, VOCABULARY, (1, tokens), generator=generator)
    first = tokens - BEHIND if way == "prompt" else BEHIND
    modules = [one for one in exact.modules() if any(True for _ in one.parameters(recurse=False))]
    with in_float64(), noting(1, modules) as choices:
        wanted = logits(exact, ids, first)
    found = []
    for model in (stock, ours):
        with repeating(choices.carried(exact, model)):
            found.append(logits(model, ids, first))
    errors = [(one.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1) for one in found]
    row: dict[str, Any] = {}
    for name, error in zip(("stock", "accel"), errors, strict=True):
        places = (error, *error.tensor_split(PARTS))  # all of it, then parts in their order
        row[name] = [float(f"{float(one.square().mean().sqrt()):.3g}") for one in places]
        row[f"{name}_most"] = float(f"{float(error.max()):.3g}")
    return row | {"ratio": round(row["accel"][0] / row["stock"][0], 3)}


def logits(model: Any, ids: torch.Tensor, first: int) -> torch.Tensor:
    """(tokens, vocabulary) of those behind the prompt of so many."""
    cache = DynamicCache(config=model.config)
    given = cache_given(type(model).forward, cache) | {"use_cache": True}
    found = [model(input_ids=ids[:, :first], **given).logits[:, -1]]
    found += [model(input_ids=ids[:, at : at + 1], **given).logits[:, -1] for at in range(first, ids.shape[1])]
    return torch.cat(found)
