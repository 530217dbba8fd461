"""Text encoders over many texts of different lengths: stock, stock's best, and accel, in real tokens a second."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import accel
from accel.bench.llm.models import beside
from accel.bench.results import reported
from accel.bench.timing import compare_times, same_call
from accel.bench.weights import random_transformer
from accel.comparison import relative_rms

SHORTEST, LONGEST, QUERY = 10, 500, 16
CALLS = 4  # over all texts before one is timed: kernels are chosen in the first, graphs captured in the others


class Encoder(NamedTuple):
    """A published configuration: the names of its class and its config's in transformers, and what differs there."""

    model: str
    config: str
    given: dict[str, Any]


LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_M3 = LARGE | {"vocab_size": 250002, "max_position_embeddings": 8194, "type_vocab_size": 1}
QWEN = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
QWEN |= {"intermediate_size": 3072, "head_dim": 128, "vocab_size": 151669}
_TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
ENCODERS = {
    "bge-m3": Encoder("XLMRobertaModel", "XLMRobertaConfig", _M3),
    "bge-reranker-v2-m3": Encoder("XLMRobertaForSequenceClassification", "XLMRobertaConfig", _M3 | {"num_labels": 1}),
    "bert-base": Encoder("BertModel", "BertConfig", {}),
    "minilm-l6": Encoder(
        "BertModel",
        "BertConfig",
        {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    ),
    "modernbert-base": Encoder("ModernBertModel", "ModernBertConfig", {}),
    "qwen3-embedding-0.6b": Encoder("Qwen3Model", "Qwen3Config", QWEN),
    "tiny": Encoder("BertModel", "BertConfig", _TINY | {"vocab_size": 100}),
}


def build_encoder(one: Encoder, device: torch.device, dtype: torch.dtype) -> Any:
    """The model with random weights."""
    import transformers

    return random_transformer(one.model, getattr(transformers, one.config)(**one.given), device, dtype)


Batch = dict[str, torch.Tensor]


def texts(count: int, vocabulary: int, longest: int) -> list[torch.Tensor]:
    """Token ids of texts of different lengths in no order."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(SHORTEST, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(4, vocabulary, (length,), generator=generator) for length in lengths]


def batched(some: list[torch.Tensor], size: int, device: torch.device) -> list[Batch]:
    """So many texts at a time, padded on the right to the longest of each."""
    batches = []
    for start in range(0, len(some), size):
        part = some[start : start + size]
        ids = nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=1)
        lengths = torch.tensor([len(one) for one in part])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        batches.append({"input_ids": ids.to(device), "attention_mask": mask.to(device)})
    return batches


def pooled(model: nn.Module, batch: Batch) -> torch.Tensor:
    """One row a text: logits, or the mean over its tokens, normalized."""
    more = {"use_cache": False} if hasattr(model.config, "use_cache") and "Model" in type(model).__name__ else {}
    output = model(**batch, **more)
    if "logits" in output:
        return output.logits.float()
    mask = batch["attention_mask"][..., None]
    mean = (output.last_hidden_state * mask).sum(1) / mask.sum(1)
    return nn.functional.normalize(mean.float(), dim=-1)


def measure_encoder(
    name: str, device: torch.device, count: int, size: int, compiled: bool, budget_s: float, int8: bool = False
) -> dict:
    """Real tokens a second of all texts, by each way in turns, and milliseconds of one query.

    Ways: stock in the given order and sorted by length, as sentence-transformers does; torch.compile of the second;
    accel in both orders, with `padding="zeros"`, and where asked for with products in int8. errors: of the rows, from
    float32's. similarities: of embeddings, how far the cosine of two texts is off at most. Raises KeyError for an
    unknown name.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    stock = build_encoder(ENCODERS[name], device, dtype)
    fast, zeros = accel.optimize(beside(stock)), accel.optimize(beside(stock), padding="zeros")
    models = {"stock": stock, "accel": fast, "accel, zeros": zeros}
    if int8:
        # A copy: weights that are quantized go to the host, and those beside it are the same tensors.
        models["accel, int8"] = accel.optimize(copy.deepcopy(stock), weights="int8", activations="int8")
    some = texts(count, stock.config.vocab_size, LONGEST if device.type == "cuda" else 4 * SHORTEST)
    tokens = sum(map(len, some))
    orders = {"given": batched(some, size, device), "sorted": batched(sorted(some, key=len), size, device)}

    def through(model: nn.Module, order: str) -> Callable[[int], Any]:
        return same_call(lambda: [pooled(model, batch) for batch in orders[order]])

    ways = {way: through(model, "given") for way, model in models.items()}
    ways |= {f"{way}, sorted": through(models[way], "sorted") for way in ("stock", "accel")}
    with torch.inference_mode():
        if compiled:
            twin = copy.deepcopy(stock)
            twin.forward = torch.compile(twin.forward, dynamic=True)
            ways["compile, sorted"] = through(twin, "sorted")
        errors, similarities = _errors(models, orders["given"][0])
        times = compare_times(ways, device, budget_s=budget_s, warmup=1, calls_before=CALLS)
        row: dict[str, Any] = {"name": name, "texts": count, "batch": size, "tokens": tokens, "errors": errors}
        row["similarities"] = similarities
        row["ways"] = {
            way: one.to_dict() | {"tokens_s": round(1e3 * tokens / one.median_ms)} for way, one in times.items()
        }
        ids = some[0].new_full((1, QUERY), 5).to(device)
        one = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        asked = {way: same_call(partial(pooled, models[way], one)) for way in ("stock", "accel")}
        found = compare_times(asked, device, budget_s=min(1.0, budget_s), warmup=20)
        row["query"] = {way: one.to_dict() for way, one in found.items()}
    return row | reported(*[*models.values()][1:])


def _errors(every: dict[str, nn.Module], batch: Batch) -> tuple[dict[str, float], dict[str, float]]:
    """Of rows from float32's, relative; and of the products of each two of them where they are embeddings."""
    exact = pooled(copy.deepcopy(every["stock"]).float(), batch)
    found = {way: pooled(model, batch) for way, model in every.items()}
    errors = {way: round(relative_rms(rows, exact), 6) for way, rows in found.items()}
    if not torch.allclose(exact.norm(dim=-1), exact.new_ones(())):
        return errors, {}
    off = {way: (rows @ rows.T - exact @ exact.T).abs().max() for way, rows in found.items()}
    return errors, {way: round(float(one), 6) for way, one in off.items()}
