"""Causal attention of a whole prompt by torch's own kernels: cuDNN's where its plan pays, else flash attention.

cuDNN's is the fastest on Hopper, but plans every new length for 30 to 70 ms. On an H200 a prompt of 8192 tokens wins
that back, and so does a length that comes again. The driver compiles, up to a second, for the first plan of a length
that is a multiple of 128, and of one that is none. A warmup makes both, beside what else it compiles.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from accel_kernels.warmup import alongside, warming_up

LONG = 8192  # tokens of a prompt that pays for its plan
MOST_SHAPES = 256  # remembered; the oldest is forgotten

FLASH_FIRST = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, *FLASH_FIRST]


class PromptAttention:
    """Counts the prompts of every shape, and knows for which kinds cuDNN was loaded; copies and pickles start anew."""

    def __init__(self):
        self.prompts: dict[tuple, int] = {}
        self.loaded: set[tuple] = set()

    def __getstate__(self):
        return {}

    def __setstate__(self, state):
        PromptAttention.__init__(self)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, first: bool, again: bool = False
    ) -> torch.Tensor:
        """q: (rows, heads, tokens, D); k, v: (rows, kv heads, tokens, D), any strides. first: of a forward's layers.

        again: this shape will come again, as one that prompts are filled up to. Returns q's shape.
        """
        if warming_up():
            kind = (q.shape[1], k.shape[1], q.shape[3], q.shape[2] % 128 == 0, q.dtype, q.device)
            if kind not in self.loaded and (again or q.shape[2] >= LONG):
                self.loaded.add(kind)
                alongside(partial(_load, torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), scale))
            return torch.empty_like(q)
        key = (q.shape, k.shape, q.dtype, q.device)
        if key not in self.prompts and len(self.prompts) >= MOST_SHAPES:
            del self.prompts[next(iter(self.prompts))]
        self.prompts[key] = self.prompts.get(key, 0) + first
        order = CUDNN_FIRST if again or q.shape[2] >= LONG or self.prompts[key] > 1 else FLASH_FIRST
        with sdpa_kernel(order, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def _load(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
    """Lets cuDNN make a plan for such a prompt. By its own name: which kernels torch prefers is set for all threads."""
    with torch.cuda.device(q.device), torch.no_grad():
        torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, False, 0.0, True, False, scale=scale)
