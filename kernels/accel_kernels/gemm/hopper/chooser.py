"""A linear layer and what follows it by the fastest way on this card, chosen by timing, once for each shape."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from accel_kernels.autotune import Choices, Form, Place, race
from accel_kernels.gemm.hopper.hopper_gemm import hopper_gemm
from accel_kernels.gemm.hopper.tiles import HopperTile, fitting
from accel_kernels.tolerances import BACKEND, SMALLEST_OUTPUT
from accel_kernels.trials import collecting
from accel_kernels.warmup import warming_up

PASSES = "passes"
LEAST_GAIN = 0.03  # of the time; closer ones are noise
REACH = 1.1  # factor between two numbers of rows up to which the choice for one is taken for the other


class HopperChooser(Choices):
    """Callable like the op `hopper_gemm`, of 16-bit operands, and in its place. cache: see `Choices`.

    Until a shape is measured, and where the kernel cannot run, the library's product between passes does. Measured is
    where somebody collects trials, as who captures CUDA graphs does. A choice is PASSES or the name of a tile.
    """

    name, reference, supports = (
        hopper_gemm.name, staticmethod(hopper_gemm.reference), staticmethod(hopper_gemm.supports)
    )  # fmt: skip

    def __call__(self, x, weight, bias=None, **after):
        if not x.is_cuda:
            return hopper_gemm.reference(x, weight, bias, **after)
        tile = self._tile(x, weight, bias, after)
        if tile is None:
            return hopper_gemm.instead(x, weight, bias, **after)
        return hopper_gemm.triton(x, weight, bias, tile=tile, **after)

    def _tile(self, x, weight, bias, after: dict[str, Any]) -> HopperTile | None:
        if not isinstance(x, torch.Tensor) or hopper_gemm.supports(x, weight, bias, **after) is not None:
            return None
        key = key_of(x, weight, bias, after)
        choice = self.choices.get(key)
        if choice is None:
            if warming_up() or torch.cuda.is_current_stream_capturing() or not collecting():
                return None
            forms = [_formed(one) for one in (x, weight, bias)]
            more = {name: _formed(one) for name, one in after.items()}
            choice = self.decide(key, partial(self._trial, key, forms, more), PASSES)
        return None if choice == PASSES else HopperTile(*map(int, choice.split(" ")))

    def place(self, key: str) -> Place:
        shape, *kind = key.split(" ")
        rows, *sizes = map(int, shape.split("x"))
        return Place((*sizes, *kind), (rows,))

    def _trial(self, key: str, forms: list, more: dict[str, Any]) -> Iterator[str | None]:
        """A step runs one tile for the first time, or lets all race."""
        tiles = {tile.name: tile for tile in fitting(more.get("up") is not None, promoted=False)}
        for known, take in ((self.stored(key), self.learn), (self.neighbor(key, REACH), self.adopt)):
            if known == PASSES or known in tiles:
                take(key, known)
                return
        device = forms[0].device
        with torch.cuda.device(device):
            args = [_filled(one) for one in forms]
            given = {name: _filled(one) for name, one in more.items()}
            wanted = hopper_gemm.instead(*args, **given)
        runs = {}
        for name, tile in tiles.items():
            yield None
            with torch.cuda.device(device):
                run = partial(hopper_gemm.triton, *args, tile=tile, **given)
                off = (run() - wanted).abs().max()
                if bool(off <= BACKEND * wanted.abs().max().clamp_min(SMALLEST_OUTPUT)):
                    runs[name] = run
        yield None
        with torch.cuda.device(device):
            own, *times = race([partial(hopper_gemm.instead, *args, **given), *runs.values()])
        best = min(times, default=own)
        yield list(runs)[times.index(best)] if best < (1 - LEAST_GAIN) * own else PASSES


def key_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, after: dict[str, Any]) -> str:
    """Sizes, dtype and what follows; numbers and which of the optional tensors there are, not what is in them."""
    given = {"bias": bias} | after
    words = [
        name if isinstance(one, torch.Tensor) else f"{name}={one}" for name, one in given.items() if one is not None
    ]
    shape = f"{x.numel() // x.shape[-1]}x{weight.shape[0]}x{x.shape[-1]}"
    return " ".join([shape, str(x.dtype)[6:], *sorted(words)])


def _formed(one: Any) -> Any:
    return Form.of(one) if isinstance(one, torch.Tensor) else one


def _filled(one: Any) -> Any:
    return one.filled() if isinstance(one, Form) else one
