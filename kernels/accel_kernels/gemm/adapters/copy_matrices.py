"""Many matrices copied into others in one launch, as adapters are that a CUDA graph reads at addresses that stay."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from accel_kernels.op import make_op, random_cases

FIELDS = 5  # of a row of the table: addresses of source and target, numbers, columns, and the target's row stride


class MatrixCopies(NamedTuple):
    """sources: contiguous matrices of one dtype. targets: of their shapes and one dtype, with rows evenly spaced. All
    begin at multiples of 16 bytes.

    factors: float32, one each. table: int64 (count, FIELDS), what kernels read. Made by `matrix_copies`.
    """

    sources: tuple[torch.Tensor, ...]
    targets: tuple[torch.Tensor, ...]
    factors: torch.Tensor
    table: torch.Tensor

    @property
    def is_cuda(self) -> bool:
        return self.factors.is_cuda

    def scaled(self, factors: Sequence[float]) -> "MatrixCopies":
        """The same with other factors."""
        return self._replace(factors=_on(self.factors.device, factors, torch.float32))


def matrix_copies(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], factors: Sequence[float]
) -> MatrixCopies:
    """The copies of sources to targets, on the device of these."""
    pairs = zip(sources, targets, strict=True)
    rows = [(a.data_ptr(), b.data_ptr(), a.numel(), a.shape[1], b.stride(0)) for a, b in pairs]
    device = targets[0].device
    table = _on(device, rows, torch.int64)
    return MatrixCopies(tuple(sources), tuple(targets), _on(device, factors, torch.float32), table)


def _on(device: torch.device, numbers: Sequence, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(device)


def reference(copies, factor=1.0):
    """Writes source * its factor * factor, rounded once, to each target, and returns the targets."""
    for source, target, own in zip(copies.sources, copies.targets, copies.factors.tolist(), strict=True):
        target.copy_(source.float() * own * factor)
    return copies.targets


def supports(copies, factor=1.0) -> str | None:
    return None if copies.sources else "empty"


@random_cases
def _case(rand, *shapes, wider=0, factor=1.0):
    sources = [rand(*shape) for shape in shapes]
    wide = [torch.zeros(n, k + wider, dtype=rand.dtype, device=rand.device) for n, k in shapes]
    targets = [one[:, : shape[1]] for one, shape in zip(wide, shapes, strict=True)]
    return (matrix_copies(sources, targets, [1.0 + 0.5 * i for i in range(len(shapes))]), factor), {}


CASES = (
    _case("alike", (16, 72), (16, 40), small=True),
    _case("wider", (33, 4), (70, 5), (1, 3), wider=12, factor=-0.7, small=True),
    _case("llama", *[(16, 4096), (4096, 16)] * 64),
)

copy_matrices = make_op("copy_matrices", reference, supports, CASES)
