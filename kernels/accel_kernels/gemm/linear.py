"""A linear layer by the fastest of cuBLASLt's algorithms, chosen by timing them on this card, once a shape.

In a CUDA graph only: there the choice costs nothing, while outside of one the direct call takes the host longer than
torch's.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from accel_kernels.autotune import Choices, Form, Place, race
from accel_kernels.gemm.cublaslt import TYPES, CublasLt, Product
from accel_kernels.tolerances import ALGORITHM, SMALLEST_OUTPUT
from accel_kernels.warmup import warming_up

TORCH = "torch"
LEAST_GAIN = 0.03  # of the time; closer ones are noise
REACH = 2.0  # factor between two numbers of rows up to which torch's own being the best for one is taken for the other


def _as_torch_alone_may() -> bool:
    """Whether the user has asked of torch's products what the algorithms named here do not promise."""
    full = not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    return full or torch.are_deterministic_algorithms_enabled()


class LinearChooser(Choices):
    """Callable like F.linear: (..., K), (N, K), (N,) or None -> (..., N).

    Falls back to torch for other dtypes, layouts and devices, and where the library cannot be loaded. cache: see
    `Choices`.
    """

    def __init__(self, cache: Path | None = None):
        super().__init__(cache)
        self.products: dict[str, Product] = {}
        self.lt: CublasLt | None = None
        self.broken = torch.version.cuda is None

    def __call__(self, x, weight, bias=None):
        if self.broken or _as_torch_alone_may() or self._refuses(x, weight, bias):
            return F.linear(x, weight, bias)
        rows = x.numel() // x.shape[-1]
        key = f"{rows}x{weight.shape[0]}x{x.shape[-1]} {str(x.dtype)[6:]}{' bias' if bias is not None else ''}"
        if not torch.cuda.is_current_stream_capturing():
            if key not in self.choices and not warming_up():
                self._ask(key, x, weight, bias)
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

    def place(self, key: str) -> Place:
        shape, *kind = key.split(" ")
        rows, outs, depth = map(int, shape.split("x"))
        return Place((outs, depth, *kind), (rows,))

    def _ask(self, key: str, x, weight, bias) -> None:
        stored = self.stored(key)
        if stored == TORCH or (stored is not None and self._holds(stored, key, x, bias, weight)):
            self.learn(key, stored)
        elif stored is None and self.neighbor(key, REACH) == TORCH:
            self.adopt(key, TORCH)
        else:
            flat = x.view(-1, x.shape[-1])
            shift = None if bias is None else Form.of(bias)
            self.decide(key, partial(self._trial, key, Form.of(flat), Form.of(weight), shift), TORCH)

    def _run(self, product, rank, x, weight, bias):
        y = torch.empty((*x.shape[:-1], weight.shape[0]), device=x.device, dtype=x.dtype)
        product.run(rank, x, weight, bias, y)
        return y

    def _product(self, key: str, rows: int, weight, bias: bool) -> Product | None:
        """weight: a tensor, or its form."""
        try:
            if self.lt is None:
                self.lt = CublasLt()
            outs, depth = weight.shape
            self.products[key] = Product(self.lt, rows, outs, depth, weight.dtype, bias)
        except (OSError, RuntimeError, AttributeError):  # no such library, or one that knows nothing of this product
            self.broken = self.lt is None
            return None
        return self.products[key]

    def _holds(self, stored: str, key: str, x, bias, weight) -> bool:
        product = self._product(key, x.numel() // x.shape[-1], weight, bias is not None)
        return product is not None and stored.isdigit() and int(stored) < len(product.algorithms)

    def _trial(self, key: str, x: Form, weight: Form, bias: Form | None) -> Iterator[str | None]:
        """A step runs one algorithm for the first time, or lets all race; it leaves no tensors behind."""

        def given() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
            return x.filled(), weight.filled(), None if bias is None else bias.filled()

        with torch.cuda.device(x.device):
            product = self._product(key, x.shape[0], weight, bias is not None)
        if product is None:
            yield TORCH
            return
        ranks = []
        for rank in range(len(product.algorithms)):
            yield None
            with torch.cuda.device(x.device):
                if self._agrees(product, rank, *given()):
                    ranks.append(rank)
        if not ranks:
            yield TORCH
            return
        yield None
        with torch.cuda.device(x.device):
            tensors = given()
            runs = [partial(self._run, product, rank, *tensors) for rank in ranks]
            own, *times = race([partial(F.linear, *tensors), *runs])
        best = min(times)
        yield str(ranks[times.index(best)]) if best < (1 - LEAST_GAIN) * own else TORCH

    def _agrees(self, product: Product, rank: int, x, weight, bias) -> bool:
        wanted = F.linear(x, weight, bias)
        try:
            off = (self._run(product, rank, x, weight, bias) - wanted).abs().max()
        except RuntimeError:  # named by the heuristic, refused by the library
            return False
        return bool(off <= ALGORITHM * wanted.abs().max().clamp_min(SMALLEST_OUTPUT))
