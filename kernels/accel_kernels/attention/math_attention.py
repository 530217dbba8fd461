"""Torch's own attention by products and a softmax alone, for runs of a few tokens that are thrown away."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class MathAttention(TorchFunctionMode):
    """Inside, `scaled_dot_product_attention` of this thread, given a query on a GPU, runs no kernel made for it.

    cuDNN, which torch prefers, makes a plan for every new shape: 40 ms of the host's time on an H100, and 300 to 1,000
    with an empty cache of compiled code. The switch that torch has for that is one for all threads.
    """

    def __torch_function__(
        self, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and args and args[0].is_cuda:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)


def math_attention() -> AbstractContextManager:
    """`MathAttention` where a query can be on a GPU; elsewhere it would only slow every operation down."""
    return MathAttention() if torch.cuda.is_initialized() else nullcontext()


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> torch.Tensor:
    """As `scaled_dot_product_attention`; more: scale, enable_gqa."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # which torch up to 2.11 would add as ones here
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -math.inf)
    found: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, **more
    )[0]
    return found
