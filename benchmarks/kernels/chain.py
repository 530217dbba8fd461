"""The kernels of one token of a language model's shape in one CUDA graph, without a model around them.

By format of the weights and rows: milliseconds of the products, the head's included; with `--attention` of attention
over 512 stored tokens and of all together too. What generate() takes beyond that is the model's own small operations,
generate()'s, and Python. Whether each product is right, and what it takes alone: `products`.
"""

from functools import partial
from pathlib import Path

import torch
from accel_kernels import Norm, paged_attention

from benchmarks.kernels.shapes import FORMATS, SHAPES, Product, Sizes
from benchmarks.kernels.stored_attention import store
from benchmarks.kernels.timer import compile_ahead, graph_ms, rand
from benchmarks.study import TOY, Study, numbers, words

STORED = 512
DIM = 16 if TOY else 128  # of a head


class Token:
    """One step: layers with distinct weights, and a head that all formats share or that is in 8 bits."""

    def __init__(self, model: str, format: str, head: Product):
        self.shape, self.head = SHAPES[model], head
        self.layers = 2 if TOY else self.shape.layers
        self.products = {name: Product(sizes, format, self.layers) for name, sizes in self.shape.products.items()}
        self.hidden = self.products["out"].n
        self.norm = Norm(rand(self.hidden), None, 1e-5)
        self.nbytes = sum(one.nbytes for one in self.products.values()) * self.layers + head.nbytes

    def multiply(self, name: str, layer: int, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        one = self.products[name]
        given = {"norm": self.norm} if one.sizes.norm else {"residual": residual}
        given |= {"activation": one.sizes.activation} if one.sizes.gate else {}
        return one.call(one.op, x, one.sets[layer], given)

    def attention(self, layer: int, qkv: torch.Tensor, kvs: list, angles: torch.Tensor) -> torch.Tensor:
        heads = self.hidden // DIM
        others = (qkv.shape[1] // DIM - heads) // 2
        q, k, v = qkv.view(len(qkv), 1, -1, DIM).split([heads, others, others], dim=2)
        return paged_attention(q, k, v, kvs[layer], DIM**-0.5, cos=angles, sin=angles).view(len(qkv), -1)

    def step(self, x: torch.Tensor, kvs: list | None = None, angles: torch.Tensor | None = None) -> torch.Tensor:
        for layer in range(self.layers):
            qkv = self.multiply("qkv", layer, x, x)
            inner = qkv.view(-1)[: x.numel()].view_as(x) if kvs is None else self.attention(layer, qkv, kvs, angles)
            x = self.multiply("out", layer, inner, x)
            x = self.multiply("down", layer, self.multiply("gate-up", layer, x, x), x)
        (weight,) = self.head.sets[0]
        return self.head.op(x, weight)


def attend(token: Token, qkv: torch.Tensor, kvs: list, angles: torch.Tensor) -> None:
    for layer in range(token.layers):
        token.attention(layer, qkv, kvs, angles)


def main(
    out: Path, model: str = "llama-8b", formats: str = "bf16,int8,int4,fp8", rows: str = "1,2,4,8,16,32,64",
    attention: bool = False, head: bool = False,
):  # fmt: skip
    """head: in 8 bits, as of weights="int8-head", but for bf16."""
    shape, about = SHAPES[model], f"{model}, head in {'8 bits' if head else 'bf16'}, one CUDA graph"
    record = Study("chain", out, about, stored=STORED if attention else None, rows=[])
    sizes = Sizes(shape.words, shape.hidden)
    plain = Product(sizes, "bf16", 1)
    counts = numbers(rows)[: 2 if TOY else None]
    for format in words(formats):
        own = head and FORMATS.get(format) is not None
        token = Token(model, format, Product(sizes, "fp8" if format == "fp8" else "int8", 1) if own else plain)
        inputs = {count: rand(count, token.hidden) for count in counts}
        compile_ahead([partial(token.step, x) for x in inputs.values()])
        for count, x in inputs.items():
            ms = graph_ms(partial(token.step, x))
            row = {"format": format, "rows": count, "products_ms": ms, "tb_s": round(token.nbytes / ms / 1e9, 2)}
            if attention:
                qkv, angles = rand(count, token.products["qkv"].n), rand(count, 1, DIM // 2)
                others = (qkv.shape[1] - token.hidden) // DIM // 2
                kvs = store(count, STORED, None, token.layers, others, DIM)
                row["attention_ms"] = graph_ms(partial(attend, token, qkv, kvs, angles))
                row["all_ms"] = graph_ms(partial(token.step, x, kvs, angles))
            record.add("rows", row)
        del token
