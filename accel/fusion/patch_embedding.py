"""A convolution whose kernel is as large as its stride, as of the patches of an image: one matrix product.

cuDNN takes up to a hundred times as long for such a convolution over video in 16 bits.
"""

from typing import Any

import torch
from torch import nn

from accel.patching.fast_forward import FastForward
from accel.patching.guard import Parts
from accel.patching.rule import Context, Match, Site
from accel.patching.structure import no_tensor, plain


class PatchEmbeddingForward(FastForward):
    """nn.Conv2d or nn.Conv3d, as the product of rows of patches and the weight.

    Gives (B, N, *grid) as a view of (B, *grid, N), which most models make rows of patches of again.
    """

    example_rows = (1, 2)

    def unfit(self, input: Any) -> str | None:
        weight = self.module.weight
        if (reason := no_tensor(input)) is not None:
            return reason
        if input.dim() != weight.dim() or input.shape[1] != weight.shape[1] or input.dtype is not weight.dtype:
            return "input of another dtype or number of dimensions, or without a batch"
        if any(size < patch for size, patch in zip(input.shape[2:], self.module.kernel_size, strict=True)):
            return "an image that is smaller than a patch"  # which stock refuses; a product would give none
        return None if is_patch_embedding(self.module) else "its stride is another than its kernel now"

    def parts(self) -> Parts:
        return Parts(live=(self.module,))

    def example(self, rows: int, like: torch.Tensor) -> tuple:
        weight = self.module.weight.detach()
        return (weight.new_ones(rows, weight.shape[1], *(16 * size for size in weight.shape[2:])),)

    def fast(self, input: torch.Tensor) -> torch.Tensor:
        weight, kernel = self.module.weight, self.module.kernel_size
        x, dims = input, range(2, 2 * len(kernel) + 2, 2)
        for dim, size in zip(dims, kernel, strict=True):  # a rest at the edge is in no patch
            x = x.narrow(dim, 0, x.shape[dim] // size * size).unflatten(dim, (-1, size))
        inside = [dim + 1 for dim in dims]
        last = not weight.is_contiguous()  # channels, see `ChannelsLast`
        x = x.permute(0, *dims, *((*inside, 1) if last else (1, *inside))).flatten(-len(kernel) - 1)
        return self.kernels.linear(x, (weight.movedim(1, -1) if last else weight).flatten(1), self.module.bias).movedim(
            -1, 1
        )


def is_patch_embedding(module: Any) -> bool:
    """Whether a module is a convolution over images or video whose windows lie side by side."""
    if type(module) not in (nn.Conv2d, nn.Conv3d) or module.groups != 1 or module.padding_mode != "zeros":
        return False
    still = all(one == 0 for one in module.padding) if isinstance(module.padding, tuple) else module.padding == "valid"
    apart = max(module.kernel_size) > 1 and tuple(module.kernel_size) == tuple(module.stride)
    return apart and still and all(one == 1 for one in module.dilation)


def match_patch_embedding(site: Site, context: Context) -> Match | None:
    """Exactly nn.Conv2d or nn.Conv3d."""
    if not is_patch_embedding(site.module) or plain(site.module, type(site.module)) is not None:
        return None
    forward = PatchEmbeddingForward(site.module, site.path, context.kernels, context.log)
    forward.pays = type(site.module) is nn.Conv3d
    return Match(forward)
