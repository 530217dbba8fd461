"""What a decode step must move at least: every weight it uses once, keys and values of all tokens so far, and states.

Divided by the speed at which the same card copies memory this is the least time a token can take.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from accel.bench.timing import seconds
from accel.in_flight import listening
from accel.libraries.cache import cache_of
from accel.llm.recording.inputs import example_inputs
from accel.llm.recording.recorder import decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROLES = ("QKV", "attention", "out", "gate and up", "down", "experts", "head", "norms and rest")
COPY_BYTES = {"cuda": 2**31, "cpu": 2**26}
COPIES = 15


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy on the device, those read and those written both counted."""
    size = COPY_BYTES.get(device.type, 2**26)
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [seconds(lambda: target.copy_(source), device) for _ in range(COPIES)]
    return 2 * size / statistics.median(times[3:])


@dataclass
class Traffic:
    """Bytes of a decode step by role. `products`: the matrices, each with its role."""

    weights: dict[str, int] = field(default_factory=dict)
    products: list[tuple[nn.Parameter, str]] = field(default_factory=list)
    cached: list[tuple[int, int | None]] = field(default_factory=list)  # a layer: bytes a token, window
    states: int = 0  # bytes a row, which a step reads and writes
    experts: tuple[int, int] | None = None  # how many there are, and how many a token takes

    @classmethod
    @torch.no_grad()
    def of(cls, stock: nn.Module) -> "Traffic":
        """Found by watching a short forward of the stock model: roles are places in the order of calls, not names."""
        given, outputs = example_inputs(stock, 1, 4, padded=False), []
        roles = _roles(stock, lambda: outputs.append(stock(**given, use_cache=True)))
        cache = cache_of(outputs[0])
        matrices = ((p, roles[id(m)]) for m in stock.modules() if id(m) in roles for p in m._parameters.values())
        traffic = cls(products=[(p, role) for p, role in matrices if p is not None and p.dim() >= 2])
        for layer in getattr(cache, "layers", []):
            if (keys := getattr(layer, "keys", None)) is not None:
                each = (keys.nbytes + layer.values.nbytes) // (keys.shape[0] * keys.shape[2])
                traffic.cached.append((each, getattr(layer, "sliding_window", None)))
            kept = (getattr(layer, name, {}) for name in ("recurrent_states", "conv_states"))
            traffic.states += sum(t.nbytes // len(t) for part in kept for t in part.values() if t is not None)
        traffic.weights = _weights(stock, roles)
        if "experts" in traffic.weights:
            many = max(
                p.shape[0] for m in stock.modules() for p in m._parameters.values() if p is not None and _stacked(p)
            )
            traffic.experts = (many, getattr(stock.config, "num_experts_per_tok", None) or many)
        return traffic

    def cache(self, rows: int, tokens: int) -> int:
        """Bytes of keys and values that a step reads where every row holds `tokens`, and of states, twice."""
        read = sum(each * min(tokens, window or tokens) for each, window in self.cached)
        return rows * (read + 2 * self.states)

    def hit(self, rows: int) -> float:
        """The share of the experts that so many independent choices are expected to hit."""
        many, taken = self.experts or (1, 1)
        return 1 - (1 - taken / many) ** rows

    def step(self, rows: int, tokens: int) -> dict[str, int]:
        """Bytes by role, attention being the keys and values."""
        found = {role: self.weights.get(role, 0) for role in ROLES}
        found["experts"] = int(found["experts"] * self.hit(rows))
        return found | {"attention": self.cache(rows, tokens)}

    def step_bytes(self, rows: int, tokens: int) -> int:
        return sum(self.step(rows, tokens).values())

    def flops(self, tokens: int, width: int, itemsize: int) -> float:
        """Of a prompt of so many tokens, one row, logits of the last; width: channels of all heads of one layer."""
        layers = sum(self.weights.get(role, 0) for role in ("QKV", "out", "gate and up", "down")) / itemsize
        head = self.weights.get("head", 0) / itemsize
        scores = sum(2 * tokens * min(tokens, window or tokens) * width for _, window in self.cached)
        return 2 * layers * tokens + 2 * head + scores


def _roles(model: "PreTrainedModel", run: Callable[[], object]) -> dict[int, str]:
    """Roles of the modules that multiply, by id, from the order in which a run calls them inside each layer.

    The part of a layer that is called first is its attention; the last product of a part leads out of it.
    """
    found: dict[int, str] = {}
    orders: list[dict[str, list[nn.Module]]] = []

    def note(order: dict[str, list[nn.Module]], part: str, module: nn.Module, *_: object) -> None:
        order[part].append(module)

    hooks = []
    for layer in decoder_layers(model)[1]:
        orders.append(defaultdict(list))
        for path, module in layer.named_modules():
            if any(p is not None and p.dim() >= 2 for p in module._parameters.values()):
                hooks.append((module, partial(note, orders[-1], path.partition(".")[0] if "." in path else "")))
    with listening(hooks):
        run()
    for order in orders:
        for number, modules in enumerate(order.values()):
            inner, last = ("QKV", "out") if number == 0 else ("gate and up", "down")
            if any(_stacked(p) for module in modules for p in module._parameters.values()):
                inner = last = "experts"
            found |= {id(module): inner for module in modules[:-1]} | {id(modules[-1]): last}
    head = model.get_output_embeddings()
    return found | ({} if head is None else {id(head): "head"})


def _stacked(parameter: torch.Tensor | None) -> bool:
    """Weights of several experts in one."""
    return parameter is not None and parameter.dim() == 3


def _weights(model: nn.Module, products: dict[int, str]) -> dict[str, int]:
    """Bytes of parameters by role, each once; of tables of embeddings, which are looked up, only what a head shares."""
    found: dict[str, int] = defaultdict(int)
    counted: set[int] = set()
    modules = sorted(model.modules(), key=lambda module: id(module) not in products)  # a tied head before its table
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is None or id(parameter) in counted or isinstance(module, nn.Embedding):
                continue
            counted.add(id(parameter))
            found[products.get(id(module), "norms and rest")] += parameter.nbytes
    return dict(found)
