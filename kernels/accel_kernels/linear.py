"""A linear layer by the fastest of cuBLASLt's algorithms, chosen by timing them on this card, once a shape.

In a CUDA graph only: there the choice costs nothing, while outside of one the direct call takes the host longer than
torch's.
"""

from pathlib import Path

import torch
import torch.nn.functional as F

from accel_kernels.choices import Choices, milliseconds
from accel_kernels.cublaslt import TYPES, CublasLt, Product
from accel_kernels.rehearsal import rehearsing

TORCH = "torch"
LEAST_GAIN = 0.03  # of the time; closer ones are noise


def _as_torch_alone_may() -> bool:
    """Whether the user has asked of torch's products what the algorithms named here do not promise."""
    full = not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    return full or torch.are_deterministic_algorithms_enabled()


class LinearChooser(Choices):
    """Callable like F.linear: (..., K), (N, K), (N,) or None -> (..., N).

    Falls back to torch for other dtypes, layouts and devices, and where the library cannot be loaded.
    """

    def __init__(self, cache: Path | None = None):
        super().__init__(cache)
        self.products: dict[str, Product] = {}
        self.lt: CublasLt | None = None
        self.broken = torch.version.cuda is None

    def __getstate__(self):
        return {"cache": self.cache}

    def __setstate__(self, state):
        self.__init__(**state)

    def __call__(self, x, weight, bias=None):
        if self.broken or _as_torch_alone_may() or self._refuses(x, weight, bias):
            return F.linear(x, weight, bias)
        rows = x.numel() // x.shape[-1]
        key = f"{rows}x{weight.shape[0]}x{x.shape[-1]} {str(x.dtype)[6:]}{' bias' if bias is not None else ''}"
        if not torch.cuda.is_current_stream_capturing():
            if not rehearsing():
                given = (key, x, weight, bias)
                self.decide(key, lambda stored: self._holds(stored, *given), lambda: self._measure(*given))
            return F.linear(x, weight, bias)
        choice = self.choices.get(key, TORCH)
        if choice == TORCH:
            return F.linear(x, weight, bias)
        return self._run(self.products[key], int(choice), x, weight, bias)

    def _refuses(self, x, weight, bias) -> bool:
        return (
            not x.is_cuda
            or x.dtype not in TYPES
            or weight.dtype != x.dtype
            or not (x.is_contiguous() and weight.is_contiguous())
            or x.numel() == 0
            or bool((x.shape[-1] | weight.shape[0]) % 8)
            or bool((x.data_ptr() | weight.data_ptr()) % 16)
            or (bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous() or bias.data_ptr() % 16))
        )

    def _run(self, product, rank, x, weight, bias):
        y = torch.empty((*x.shape[:-1], weight.shape[0]), device=x.device, dtype=x.dtype)
        product.run(rank, x, weight, bias, y)
        return y

    def _product(self, key, x, weight, bias) -> Product | None:
        try:
            if self.lt is None:
                self.lt = CublasLt()
            rows = x.numel() // x.shape[-1]
            self.products[key] = Product(self.lt, rows, *weight.shape, x.dtype, bias is not None)
        except (OSError, RuntimeError, AttributeError):  # no such library, or one that knows nothing of this product
            self.broken = self.lt is None
            return None
        return self.products[key]

    def _holds(self, stored, key, x, weight, bias) -> bool:
        if stored == TORCH:
            return True
        product = self._product(key, x, weight, bias)
        return product is not None and stored.isdigit() and int(stored) < len(product.algorithms)

    def _measure(self, key, x, weight, bias) -> str:
        product = self._product(key, x, weight, bias)
        if product is None:
            return TORCH
        wanted = F.linear(x, weight, bias)
        limit = 0.01 * wanted.abs().max().clamp_min(1e-6)
        times = {TORCH: (1 - LEAST_GAIN) * milliseconds(lambda: F.linear(x, weight, bias))}
        for rank in range(len(product.algorithms)):
            try:
                if bool((self._run(product, rank, x, weight, bias) - wanted).abs().max() <= limit):
                    times[str(rank)] = milliseconds(lambda rank=rank: self._run(product, rank, x, weight, bias))
            except RuntimeError:  # named by the heuristic, refused by the library
                continue
        return min(times, key=times.get)
