"""Tiles of a decoder divided among ranks, for autoencoders with tiling on.

Stock decodes tile after tile and blends them. Here its own code runs twice: first to see which tiles it hands to the
decoder, then with the tiles that the ranks have decoded. So cutting and blending are stock's.
"""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accel.cuda_graphs.rule import graph_obstacle
from accel.diffusion.parallel.same_numbers import check_same
from accel.errors import reason_of
from accel.parallel.ranks import Ranks, all_ranks
from accel.patching.fallback_log import FallbackLog
from accel.patching.fast_forward import AS_WRITTEN, transformation
from accel.patching.owner import InstanceMethod, PartlyCopied
from accel.patching.rule import Context, Match, Patch, Site, Skip
from accel.patching.structure import holds, stock_method

NAME, METHOD = "tiles on ranks", "tiled_decode"


class AllTilesCollected(Exception):
    """Every tile has been handed to the decoder; the first is about to be blended."""


class PendingTile:
    """Stands for a decoded tile while tiles are collected."""

    def __getitem__(self, index: object) -> Any:
        raise AllTilesCollected


class TiledDecode(PartlyCopied, InstanceMethod):
    """Stands in `vars(vae)["tiled_decode"]`; takes and gives what the class's own does."""

    name, copied = METHOD, ("vae", "log")

    def __init__(self, vae: nn.Module, log: FallbackLog):
        self.vae, self.log = vae, log
        self.renew()

    @property
    def owner(self) -> nn.Module:
        return self.vae

    def renew(self) -> None:
        self.ranks = all_ranks()

    def call(self, z: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        stock = getattr(type(self.vae), METHOD)
        if torch.compiler.is_compiling() or AS_WRITTEN.get():
            return stock(self.vae, z, *args, **kwargs)
        reason = self._unfit(z)
        tiles = reason if reason is not None else self._tiles(z)
        if isinstance(tiles, str) or self.ranks is None:
            self.log.fell_back("", f"{NAME}: decoded whole: {tiles}")
            return stock(self.vae, z, *args, **kwargs)
        with_tiles = _twin(self.vae, DecodedTiles(self._decoded(tiles, self.ranks)))
        return stock(with_tiles, z, *args, **kwargs)

    def _unfit(self, z: object) -> str | None:
        if self.ranks is None:
            return "this process is alone"
        if type(z) is not torch.Tensor:
            return f"it is given a {type(z).__name__}"
        if torch.is_grad_enabled() or self.vae.training:
            return "gradients are on, or training mode"
        return transformation() or graph_obstacle(self.vae)

    def _tiles(self, z: torch.Tensor) -> "list[torch.Tensor] | str":
        """What stock hands to the decoder, in order; or why tiles cannot be told apart. All ranks say the same."""
        assert self.ranks is not None
        collector = TileCollector()
        try:
            getattr(type(self.vae), METHOD)(_twin(self.vae, collector), z)
            reason: str | None = "it does not cut tiles before it blends them"
        except AllTilesCollected:
            reason = collector.reason
        except Exception as error:
            reason = f"it does not cut tiles before it blends them: {reason_of(error)}"
        if reason is None and len(collector.tiles) < self.ranks.size:
            reason = f"{len(collector.tiles)} tiles for {self.ranks.size} ranks"
        told = {"the shape of the latents": (tuple(z.shape), str(z.dtype)), "why it is decoded whole": reason}
        place = f"{METHOD} of the {type(self.vae).__name__}"
        check_same(self.ranks, place, told, [("the latents", z)], z.device)
        return collector.tiles if reason is None else reason

    def _decoded(self, tiles: list[torch.Tensor], ranks: Ranks) -> list[torch.Tensor]:
        """All tiles decoded, each by one rank."""
        shares = assign_tiles([tile.numel() for tile in tiles], ranks.size)
        decoder = self.vae.get_submodule("decoder")
        own = [decoder(tiles[i]).contiguous() for i in shares[ranks.rank]]
        device, dtype = own[0].device, own[0].dtype
        shapes: list[list[torch.Size]] = [[] for _ in shares]
        # A group of NCCL alone sends objects through the current device.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            dist.all_gather_object(shapes, [tile.shape for tile in own], group=ranks.group)
        lengths = [[shape.numel() for shape in of_rank] for of_rank in shapes]
        longest = max(map(sum, lengths))
        flat = torch.empty(longest, dtype=dtype, device=device)
        torch.cat([tile.flatten() for tile in own], out=flat[: sum(lengths[ranks.rank])])
        everything = torch.empty(ranks.size * longest, dtype=dtype, device=device)
        dist.all_gather_into_tensor(everything.view(torch.uint8), flat.view(torch.uint8), group=ranks.group)
        found: list[torch.Tensor | None] = [None] * len(tiles)
        for rank, share in enumerate(shares):
            ends = [rank * longest]
            for length in lengths[rank]:
                ends.append(ends[-1] + length)
            for place, shape, (start, end) in zip(share, shapes[rank], pairwise(ends), strict=True):
                found[place] = everything[start:end].view(shape).clone()  # blending writes into it
        return [tile for tile in found if tile is not None]


class TileCollector:
    """Stands in for the decoder and keeps the tiles that it is given."""

    def __init__(self) -> None:
        self.tiles: list[torch.Tensor] = []
        self.reason: str | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> PendingTile:
        if len(args) != 1 or kwargs or type(args[0]) is not torch.Tensor:
            self.reason = "its decoder is given more than a tile"
        self.tiles += args[:1]
        return PendingTile()


class DecodedTiles:
    """Stands in for the decoder and returns the decoded tiles in order."""

    def __init__(self, tiles: list[torch.Tensor]):
        self.tiles: Iterator[torch.Tensor] = iter(tiles)

    def __call__(self, tile: torch.Tensor) -> torch.Tensor:
        return next(self.tiles)


def assign_tiles(work: list[int], ranks: int) -> list[list[int]]:
    """The tiles of each rank, in order: the largest tile first, each to the rank with the least work so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for place in sorted(range(len(work)), key=lambda place: -work[place]):
        least = min(range(ranks), key=lambda rank: sum(work[other] for other in shares[rank]))
        shares[least].append(place)
    return [sorted(share) for share in shares]


def _twin(vae: nn.Module, decoder: object) -> nn.Module:
    """The same autoencoder, its weights and settings, but for its decoder."""
    twin = copy.copy(vae)
    vars(twin)["_modules"] = vae._modules | {"decoder": decoder}
    return twin


def match_tiles(site: Site, context: Context) -> Match | Skip | None:
    """The root of an autoencoder that can decode by tiles."""
    module = site.module
    if context.options.parallel is None or site.path or not (holds(module, "decoder") and hasattr(module, METHOD)):
        return None
    own = vars(module).get(METHOD)
    if own is not None and not stock_method(module, own, METHOD):
        return Skip(f"its {METHOD} was replaced")
    patch = Patch(module, METHOD, TiledDecode(module, context.log))
    return Match(patches=(patch,), note="where tiling is on, each rank decodes its share of the tiles")
