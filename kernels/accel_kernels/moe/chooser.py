"""Experts by the fastest tile, chosen by timing on this card, once for each doubling of the tokens."""

from collections.abc import Iterator
from functools import partial

import torch

from accel_kernels.autotune import Choices, Place, contest
from accel_kernels.gemm.quantized_weight import Quantized
from accel_kernels.moe.experts import MOST_TOKENS, experts
from accel_kernels.moe.tiles import DEQUANTIZED, DEQUANTIZES, GEMV, MAY_DEQUANTIZE, TILES, likely_tile, mean_pairs
from accel_kernels.moe.weights import ExpertWeights
from accel_kernels.sizes import power_of_two
from accel_kernels.tolerances import BACKEND, SMALLEST_OUTPUT
from accel_kernels.trials import collecting
from accel_kernels.warmup import warming_up

MOST_TIMED = 16  # tokens that are also timed one by one; no expert has more pairs than the smallest tile


def likely_way(tokens: int, chosen: int, many: int, itemsize: int = 2) -> str:
    """What runs where nothing was measured: a name of TILES or DEQUANTIZED, or GEMV. itemsize: see `likely_tile`."""
    if itemsize == 1 and mean_pairs(tokens * chosen, many) > DEQUANTIZES:
        return list(DEQUANTIZED)[-1]
    return GEMV if tokens <= MOST_TOKENS else likely_tile(tokens * chosen, many, itemsize)


def possible_ways(tokens: int, chosen: int, many: int, itemsize: int = 2) -> list[str]:
    """What is worth timing, the likely way first, then neighboring tiles, each pair by itself, or writing out first."""
    # Of fewer bits "32" has never been the fastest.
    names, likely = [name for name in TILES if name != "32" or itemsize > 1], likely_way(tokens, chosen, many, itemsize)
    if tokens <= MOST_TIMED:
        found = [likely, GEMV, likely_tile(tokens * chosen, many, itemsize)]
    else:
        place, large = names.index(DEQUANTIZED.get(likely, likely)), names.index("64")
        found = [likely, *names[max(0, min(place - 1, large)) : place + 2 if place < large else len(names)]]
    if itemsize == 1 and mean_pairs(tokens * chosen, many) > MAY_DEQUANTIZE:
        found += DEQUANTIZED
    return list(dict.fromkeys(found))


def itemsize_of(dtype: torch.dtype, weights: ExpertWeights) -> int:
    """For `likely_way`; dtype: of the tokens."""
    return 1 if isinstance(weights.down, Quantized) else dtype.itemsize


class ExpertsChooser(Choices):
    """Callable like the op `experts`, and in its place. cache: see `Choices`.

    It times the caller's own weights, with tokens that choose at random. It does so only where trials are collected, as
    for CUDA graphs. Elsewhere, and until then, the likely tile runs.
    """

    name, reference, supports = experts.name, staticmethod(experts.reference), staticmethod(experts.supports)

    def __call__(self, x, index, shares, weights):
        if not x.is_cuda or warming_up() or experts.supports(x, index, shares, weights) is not None:
            return experts(x, index, shares, weights)
        run = partial(experts.triton, tile=self.choose(x, index, weights))
        return experts.guarded(run, x, index, shares, weights)

    def choose(self, x: torch.Tensor, index: torch.Tensor, weights: ExpertWeights) -> str:
        """The name of a tile or of DEQUANTIZED, or GEMV, for these tokens."""
        (tokens, chosen), many = index.shape, weights.experts
        stack = weights.gate_up
        stored = "rows" if weights.by_rows[0] else "columns"
        if isinstance(stack, Quantized):
            stored = f"{stack.format.name}x{stack.scales.shape[1]}{'' if stack.zeros is None else ' zeros'}"
        kind = f"{str(x.dtype)[6:]} {stored}{' interleaved' if weights.interleaved else ''}"
        key = f"{power_of_two(tokens)}x{chosen}x{many}x{weights.inner}x{weights.hidden} {kind}"
        choice, likely = self.choices.get(key), likely_way(tokens, chosen, many, itemsize_of(x.dtype, weights))
        if choice is not None:
            return choice
        if torch.cuda.is_current_stream_capturing() or not collecting():
            return likely
        return self.decide(key, partial(self._trial, key, x.dtype, tokens, chosen, weights), likely)

    def place(self, key: str) -> Place:
        shape, *kind = key.split(" ")
        tokens, *sizes = map(int, shape.split("x"))
        return Place((*sizes, *kind), (tokens,))

    def _trial(
        self, key: str, dtype: torch.dtype, tokens: int, chosen: int, weights: ExpertWeights
    ) -> Iterator[str | None]:
        """Races the ways that are worth timing, on the caller's own weights."""
        device, stored = weights.down.data.device, self.stored(key)
        names = possible_ways(tokens, chosen, weights.experts, itemsize_of(dtype, weights))
        if stored in names:
            self.learn(key, stored)
            return
        generator = torch.Generator(device)
        generator.seed()
        x = torch.randn(tokens, weights.hidden, generator=generator, device=device, dtype=dtype)
        index = torch.rand(tokens, weights.experts, generator=generator, device=device).topk(chosen).indices
        shares = torch.full((tokens, chosen), 1 / chosen, device=device, dtype=dtype)
        runs = {name: partial(experts.triton, x, index, shares, weights, tile=name) for name in names}
        with torch.cuda.device(device):
            wanted = runs[names[0]]()

        def agrees(name: str) -> bool:
            off = (runs[name]() - wanted).abs().max()
            return bool(off <= BACKEND * wanted.abs().max().clamp_min(SMALLEST_OUTPUT))

        yield from contest(names[1:], agrees, lambda found: [runs[name] for name in found], device, names[0])
