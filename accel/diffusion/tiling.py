"""Autoencoders whose images would not fit in a budget of memory encode and decode them in tiles, as diffusers does."""

import weakref
from collections.abc import Iterable
from math import prod
from typing import Any

import torch

from accel.errors import reason_of
from accel.offload.blocks import nbytes
from accel.offload.budget import SLACK, Budget
from accel.patching.owner import OWNER, PLAN, InstanceMethod, Owned
from accel.patching.rule import Patch

ENCODE, DECODE = "encode", "decode"
PLANES = 8  # of the widest layers' images, in the size of the picture, are there at the same time
FRAMES = 4  # of a video become one of latents
SETTINGS = ("use_", "tile_")  # how attributes begin that tell of tiling
LATENT_SIZE, PIXEL_SIZE = "tile_latent_min_size", "tile_sample_min_size"  # of a tile, in an `AutoencoderKL`
LEAST, MULTIPLE = 32, 8  # latents a side of a tile: what overlaps, a quarter, must be whole


class TilesWithin(InstanceMethod):
    """Callable that stands in `vars(vae)[name]`, encode or decode. room: bytes that a call may take.

    A result in tiles is not the same: diffusers blends them. So only images that are too large are cut. patch: that put
    it there.
    """

    patch: "TiledPatch"

    def __init__(self, vae: Any, name: str, room: int):
        self.vae, self.name, self.room = vae, name, room

    @property
    def owner(self) -> Any:
        return self.vae

    def call(self, *args: Any, **kwargs: Any) -> Any:
        given = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)), None)
        if given is None or given.dim() < 4 or self.vae.use_tiling:
            return self.stock(*args, **kwargs)
        frames, *sides = self._latents(given)
        if self._needs(given, frames * prod(sides)) <= self.room or min(sides) <= MULTIPLE:
            return self.stock(*args, **kwargs)
        before = {name: value for name, value in vars(self.vae).items() if name.startswith(SETTINGS)}
        try:
            self.vae.enable_tiling()
            if LATENT_SIZE in before and PIXEL_SIZE in before:
                side = min(before[LATENT_SIZE], min(sides) - 1)
                while side > LEAST and self._needs(given, frames * side * side) > self.room:
                    side //= 2
                side = max(side // MULTIPLE, 1) * MULTIPLE
                scale = before[PIXEL_SIZE] // before[LATENT_SIZE]
                vars(self.vae).update({LATENT_SIZE: side, PIXEL_SIZE: side * scale})
            return self.stock(*args, **kwargs)
        except Exception as error:  # of its tiles, which some autoencoders of diffusers cannot make
            reason_of(error)
        finally:
            self.vae.disable_tiling()
            vars(self.vae).update(before)
        return self.stock(*args, **kwargs)

    def _latents(self, given: torch.Tensor) -> tuple[int, int, int]:
        """Frames, rows and columns of them, which are there at the same time."""
        frames, (height, width) = prod(given.shape[2:-2]), given.shape[-2:]
        if hasattr(self.vae, "clear_cache"):  # a frame of latents after the other
            frames = FRAMES if frames > 1 else 1
        elif self.name == ENCODE:
            frames = -(-frames // FRAMES)
        if self.name == ENCODE:
            pixels = vars(self.vae).get("spatial_compression_ratio") or self._scale()
            height, width = height // pixels, width // pixels
        return frames, height, width

    def _widths(self) -> Any:
        config, half = self.vae.config, f"{self.name}r"
        base = config.get(f"{half}_base_dim") or config.get("base_dim", 128)
        found = config.get("block_out_channels") or config.get(f"{half}_block_out_channels")
        return found or [base * times for times in config.get("dim_mult", (1,))]

    def _scale(self) -> int:
        """Pixels a side of a latent, in the widest layers' images."""
        return 2 ** (len(self._widths()) - 1)

    def _needs(self, given: torch.Tensor, latents: int) -> int:
        """Bytes, about, of a call with so many latents of each image."""
        width = max(self._widths()[: 2 if self.name == DECODE else 1])  # the first is made of the second's, enlarged
        return PLANES * width * given.shape[0] * latents * self._scale() ** 2 * given.element_size()


class TiledPatch(Patch):
    """Pipelines that share the autoencoder have a budget each: that of the last one counts, and any may go first."""

    def __init__(self, vae: Any, name: str, room: int):
        super().__init__(vae, name, TilesWithin(vae, name, room))
        self.value.patch = self

    def undo(self) -> None:
        above = vars(self.owner).get(self.name)
        while isinstance(above, TilesWithin) and above is not self.value:
            other = above.patch
            if other.before is self.value:
                other.before, other.marks = self.before, other.marks or self.marks
                return
            above = other.before
        super().undo()

    def again(self) -> "TiledPatch":
        """The same while this is undone, for a stock autoencoder."""
        return TiledPatch(self.owner, self.name, self.value.room)

    def forsake(self) -> None:
        """Its pipeline is gone, and nobody will undo it; what else is on the autoencoder stays."""
        held = vars(self.owner)
        above = held.get(self.name)
        while isinstance(above, TilesWithin) and above is not self.value:
            above = above.patch.before
        if above is self.value:
            self.marks = False
            self.undo()
            if not any(isinstance(one, Owned) for name, one in held.items() if name != PLAN):
                held.pop(OWNER, None)


def tiles_within(pipe: Any, models: Iterable[Any], budget: Budget) -> tuple[Patch, ...]:
    """Of those models of a pipeline that can work in tiles; they end with it."""
    found = [model for model in models if hasattr(model, "use_tiling") and hasattr(model, "enable_tiling")]
    names = [(vae, name) for vae in found for name in (ENCODE, DECODE) if hasattr(vae, name)]
    made = tuple(TiledPatch(vae, name, budget.card - nbytes(vae) - SLACK) for vae, name in names)
    for patch in made:
        weakref.finalize(pipe, patch.forsake).atexit = False
    return made
