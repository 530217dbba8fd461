"""A linear layer by the fastest of cuBLASLt's algorithms, chosen by timing them on this card, once a shape.

In a CUDA graph only: elsewhere the direct call takes the host longer than torch's.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from accel_kernels.autotune import Choices, Place, TensorForm, contest
from accel_kernels.gemm.cublaslt import TYPES, CublasLt, Product
from accel_kernels.tolerances import ALGORITHM, SMALLEST_OUTPUT
from accel_kernels.warmup import warming_up

TORCH = "torch"
REACH = 2.0  # factor between two numbers of rows up to which torch's own being the best for one is taken for the other


def torch_linear(x, weight, bias=None, residual=None, gelu=False, out=None):
    """residual + x W^T + b, by torch: one product where there is not both a bias and a residual.

    gelu: GELU of it by the tanh formula, and no residual. out: where it is written and what is returned, if given;
    where it is the residual itself nothing is copied.
    """
    if out is not None and out is residual and bias is None and not gelu and out.is_contiguous():
        rows = out.view(-1, out.shape[-1])
        torch.addmm(rows, x.reshape(-1, x.shape[-1]), weight.t(), out=rows)
        return out
    if out is not None and residual is None and _by_images(out):
        for one, rows in zip(x, out, strict=True):
            torch_linear(one, weight, bias, None, gelu, rows)
        return out
    if out is not None and residual is None and not gelu and out.is_contiguous():
        flat, rows = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
        if bias is None:
            torch.mm(flat, weight.t(), out=rows)
        else:
            torch.addmm(bias, flat, weight.t(), out=rows)
        return out
    if out is not None:
        return out.copy_(torch_linear(x, weight, bias, residual, gelu))
    if gelu:
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")
    if residual is None:
        return F.linear(x, weight, bias)
    if bias is not None:
        return residual + F.linear(x, weight, bias)
    flat = torch.addmm(residual.reshape(-1, residual.shape[-1]), x.reshape(-1, x.shape[-1]), weight.t())
    return flat.view(residual.shape)


def _as_torch_alone_may() -> bool:
    """Whether the user has asked of torch's products what the algorithms named here do not promise."""
    full = not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    return full or torch.are_deterministic_algorithms_enabled()


def _by_images(out: torch.Tensor) -> bool:
    """Whether it is rows of several images that lie apart, which a product for each writes; a CPU sums in another order
    where rows are fewer.
    """
    return out.is_cuda and out.dim() == 3 and len(out) > 1 and not _evenly(out)


def _in_rows(out: torch.Tensor, width: int) -> bool:
    """Whether these are rows of this width, evenly spaced and aligned to 16 bytes."""
    apart, fit = out.stride(-2), out.shape[-1] == width and out.stride(-1) == 1
    return fit and _evenly(out) and apart >= width and not (out.data_ptr() % 16 or apart % 8)


def _evenly(out: torch.Tensor) -> bool:
    """Whether each row lies as far from the next, over all dimensions before the last."""
    sizes, strides = out.shape[-2::-1], out.stride()[-2::-1]
    return all(wide == strides[0] * torch.Size(sizes[:i]).numel() for i, wide in enumerate(strides) if sizes[i] > 1)


class LinearChooser(Choices):
    """Callable like `torch_linear`: (..., K), (N, K), (N,) or None, (..., N) or None -> (..., N). GELU is an epilogue,
    which rounds once, and out may have rows that lie apart.

    Falls back to torch for other dtypes, layouts and devices, and where the library cannot be loaded. cache: see
    `Choices`.
    """

    def __init__(self, cache: Path | None = None):
        super().__init__(cache)
        self.products: dict[str, Product] = {}
        self.lt: CublasLt | None = None
        self.card: int | None = None  # that `lt` is of: a library's context belongs to one; others multiply by torch
        self.broken = torch.version.cuda is None

    def __call__(self, x, weight, bias=None, residual=None, gelu=False, out=None):
        given = x, weight, bias, residual
        if out is not None and residual is None and _by_images(out):
            for one, rows in zip(x, out, strict=True):
                self(one, weight, bias, None, gelu, rows)
            return out
        if self.broken or _as_torch_alone_may() or self._refuses(*given, gelu, out):
            return torch_linear(*given, gelu, out)
        rows = x.numel() // x.shape[-1]
        more = "".join(f" {name}" for name, t in (("bias", bias), ("residual", residual)) if t is not None)
        apart = weight.shape[0] if out is None else out.stride(-2)
        how = f"{' gelu' if gelu else ''}{'' if apart == weight.shape[0] else f' {apart} apart'}"
        key = f"{rows}x{weight.shape[0]}x{x.shape[-1]} {str(x.dtype)[6:]}{more}{how}"
        if not torch.cuda.is_current_stream_capturing():
            if key not in self.choices and not warming_up():
                self._ask(key, *given, gelu, apart)
            return torch_linear(*given, gelu, out)
        choice = self.choices.get(key, TORCH)
        if choice == TORCH:
            return torch_linear(*given, gelu, out)
        return self._run(self.products[key], int(choice), *given, out)

    def _refuses(self, x, weight, bias, residual, gelu, out) -> bool:
        return (
            (residual is not None and (gelu or out is not None))
            or (out is not None and not _in_rows(out, weight.shape[0]))
            or not x.is_cuda
            or self.card not in (None, x.device.index)
            or x.dtype not in TYPES
            or weight.dtype != x.dtype
            or not (x.is_contiguous() and weight.is_contiguous())
            or x.numel() == 0
            or bool((x.shape[-1] | weight.shape[0]) % 8)
            or bool((x.data_ptr() | weight.data_ptr()) % 16)
            or any(
                t is not None and (t.dtype != x.dtype or not t.is_contiguous() or bool(t.data_ptr() % 16))
                for t in (bias, residual)
            )
        )

    def place(self, key: str) -> Place:
        shape, *kind = key.split(" ")
        rows, outs, depth = map(int, shape.split("x"))
        return Place((outs, depth, *kind), (rows,))

    def _ask(self, key: str, x, weight, bias, residual, gelu: bool, apart: int) -> None:
        stored = self.stored(key)
        if stored == TORCH or (stored is not None and self._holds(stored, key, x, bias, weight, gelu, apart)):
            self.learn(key, stored)
        elif stored is None and self.neighbor(key, REACH) == TORCH:
            self.adopt(key, TORCH)
        else:
            flat = x.view(-1, x.shape[-1])
            added = None if residual is None else residual.view(-1, residual.shape[-1])
            given = ((flat, False), (weight, True), (bias, False), (added, False))
            forms = [None if t is None else TensorForm.of(t, lent) for t, lent in given]
            self.decide(key, partial(self._trial, key, forms, gelu, apart), TORCH)

    def _run(self, product, rank, x, weight, bias, residual, out=None):
        y = torch.empty((*x.shape[:-1], weight.shape[0]), device=x.device, dtype=x.dtype) if out is None else out
        product.run(rank, x, weight, bias, residual, y)
        return y

    def _product(self, key: str, rows: int, weight, bias: bool, gelu: bool, apart: int) -> Product | None:
        """weight: a tensor, or its form."""
        try:
            with torch.cuda.device(weight.device):
                if self.lt is None:
                    self.lt, self.card = CublasLt(), torch.cuda.current_device()
                outs, depth = weight.shape
                self.products[key] = Product(self.lt, rows, outs, depth, weight.dtype, bias, gelu, apart)
        except (OSError, RuntimeError, AttributeError):  # no such library, or one that knows nothing of this product
            self.broken = self.lt is None
            return None
        return self.products[key]

    def _holds(self, stored: str, key: str, x, bias, weight, gelu: bool, apart: int) -> bool:
        product = self._product(key, x.numel() // x.shape[-1], weight, bias is not None, gelu, apart)
        return product is not None and stored in map(str, range(len(product.algorithms)))

    def _trial(self, key: str, forms: Sequence[Any], gelu: bool, apart: int) -> Iterator[str | None]:
        """Races the algorithms of a product. forms: of x, the weight, and the bias and the residual or None."""
        x, weight, bias, _ = forms
        outs = weight.shape[0]

        def given() -> tuple[Any, Any, Any, Any]:
            made = (None if form is None else form.filled() for form in forms)
            return next(made), next(made), next(made), next(made)

        def out() -> torch.Tensor | None:
            if apart == outs:
                return None
            return torch.empty(x.shape[0], apart, device=x.device, dtype=x.dtype)[:, :outs]

        product = self._product(key, x.shape[0], weight, bias is not None, gelu, apart)
        if product is None:
            yield TORCH
            return

        def runs(names: Sequence[str]) -> list[Callable[[], object]]:
            tensors, place = given(), out()
            ranks = [partial(self._run, product, int(rank), *tensors, place) for rank in names[1:]]
            return [partial(torch_linear, *tensors, gelu, place), *ranks]

        ranks = list(map(str, range(len(product.algorithms))))
        yield from contest(
            ranks, lambda rank: self._agrees(product, int(rank), *given(), gelu, out()), runs, x.device, TORCH
        )

    def _agrees(self, product: Product, rank: int, x, weight, bias, residual, gelu: bool, out) -> bool:
        """In place, since two outputs are what a call of the model itself holds; more would be its peak of memory."""
        given = x, weight, bias, residual
        wanted = torch_linear(*given, gelu)
        try:
            off = self._run(product, rank, *given, out).sub_(wanted).abs_().max()
        except RuntimeError:  # named by the heuristic, refused by the library
            return False
        return bool(off <= ALGORITHM * wanted.abs_().max().clamp_min(SMALLEST_OUTPUT))
