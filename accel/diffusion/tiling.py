"""Autoencoders whose images would not fit in a budget of memory decode them in tiles, as diffusers does."""

from collections.abc import Iterable
from typing import Any

import torch

from accel.offload.blocks import nbytes
from accel.offload.budget import SLACK, Budget
from accel.patching.owner import InstanceMethod
from accel.patching.rule import Patch

PLANES = 8  # of the widest layers' images, in the size of the result, are there at the same time
LATENT_SIZE, PIXEL_SIZE = "tile_latent_min_size", "tile_sample_min_size"  # of a tile, in an `AutoencoderKL`
LEAST, MULTIPLE = 32, 8  # latents a side of a tile: what overlaps, a quarter, must be whole


class DecodeWithin(InstanceMethod):
    """Callable that stands in `vars(vae)["decode"]`. room: bytes that a call may take.

    A result in tiles is not the same: diffusers blends them. So only images that are too large are decoded so. patch:
    that put it there.
    """

    name = "decode"
    patch: "TiledPatch"

    def __init__(self, vae: Any, room: int):
        self.vae, self.room = vae, room

    @property
    def owner(self) -> Any:
        return self.vae

    def call(self, z: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        decode = type(self.vae).decode
        if self.vae.use_tiling or self._needs(z, z.shape[2:].numel()) <= self.room:
            return decode(self.vae, z, *args, **kwargs)
        if min(z.shape[-2:]) <= MULTIPLE:
            return decode(self.vae, z, *args, **kwargs)
        before = {name: vars(self.vae)[name] for name in (LATENT_SIZE, PIXEL_SIZE) if name in vars(self.vae)}
        self.vae.enable_tiling()
        try:
            if len(before) == 2:
                side = min(before[LATENT_SIZE], min(z.shape[-2:]) - 1)
                while side > LEAST and self._needs(z, side * side) > self.room:
                    side //= 2
                side = max(side // MULTIPLE, 1) * MULTIPLE
                scale = before[PIXEL_SIZE] // before[LATENT_SIZE]
                vars(self.vae).update({LATENT_SIZE: side, PIXEL_SIZE: side * scale})
            return decode(self.vae, z, *args, **kwargs)
        finally:
            self.vae.disable_tiling()
            vars(self.vae).update(before)

    def _needs(self, z: torch.Tensor, latents: int) -> int:
        """Bytes, about, of decoding so many latents of each image."""
        widths = self.vae.config.get("block_out_channels") or (self.vae.config.get("base_dim", 128),)
        scale = 2 ** (len(widths) - 1)
        return PLANES * max(widths[:2]) * z.shape[0] * latents * scale**2 * z.element_size()


class TiledPatch(Patch):
    """Pipelines that share the autoencoder have a budget each: that of the last one counts, and any may go first."""

    def __init__(self, vae: Any, room: int):
        super().__init__(vae, DecodeWithin.name, DecodeWithin(vae, room))
        self.value.patch = self

    def undo(self) -> None:
        above = vars(self.owner).get(self.name)
        while isinstance(above, DecodeWithin) and above is not self.value:
            other = above.patch
            if other.before is self.value:
                other.before, other.marks = self.before, other.marks or self.marks
                return
            above = other.before
        super().undo()


def decodes_within(models: Iterable[Any], budget: Budget) -> tuple[Patch, ...]:
    """Of those models that can decode in tiles."""
    found = [model for model in models if hasattr(model, "use_tiling") and hasattr(model, "enable_tiling")]
    return tuple(TiledPatch(one, budget.card - nbytes(one) - SLACK) for one in found)
