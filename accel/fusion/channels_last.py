"""Channels-last helpers: the layout in which convolutions, norms and transformer blocks agree without copies."""

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from accel_kernels.image.frames import frames_last
from torch import Tensor, nn

from accel.fusion.float32_precision import convolutions_in_tf32, products_in_tf32
from accel.fusion.tensor_notes import TensorNotes
from accel.in_flight import alone_if_idle
from accel.libraries.adapters import base
from accel.patching.fast_forward import Kernels
from accel.patching.rule import set_data
from accel.patching.structure import pointwise
from accel.quantization.product import keeps_forward, product


def nhwc(x: Tensor) -> Tensor:
    """x: (N, C, H, W) in channels-last memory on a GPU, free where it already is; on a CPU as it comes.

    Torch's own group norm over channels-last images on a CPU is wrong far from zero, and stock code may be next.
    """
    return x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x


def ndhwc(x: Tensor) -> Tensor:
    """x: (N, C, T, H, W), each sample channels-last on a GPU, free where it already is; on a CPU as it comes."""
    return x if not x.is_cuda or frames_last(x) else x.contiguous(memory_format=torch.channels_last_3d)


def as_one_image(x: Tensor) -> Tensor:
    """Frames, (N, C, T, H, W), as (N, C, T * H, W), a view of frames that lie together; an image as it comes."""
    return x.flatten(2, 3) if x.dim() == 5 else x


def sum_frames(kernels: Kernels, x: Tensor, residual: Tensor | None, bias: Tensor | None) -> Tensor:
    """(N, C, T, H, W): x + residual + bias[c], the channel stats of the sum kept."""
    images = [None if one is None else as_one_image(ndhwc(one)) for one in (x, residual)]
    y, channel_stats = kernels.image_sum(*images, bias)
    return keep_channel_stats((y.unflatten(2, x.shape[2:4]), channel_stats))


def as_rows(x: Tensor) -> Tensor:
    """(N, C, H, W) as (N, H * W, C); a view of a channels-last image, a copy of another."""
    n, c, h, w = x.shape
    return x.permute(0, 2, 3, 1).reshape(n, h * w, c)


def as_image(rows: Tensor, height: int, width: int) -> Tensor:
    """(N, H * W, C) seen as (N, C, H, W) channels-last; a view."""
    return rows.reshape(rows.shape[0], height, width, rows.shape[-1]).permute(0, 3, 1, 2)


def as_image_like(rows: Tensor, image: Tensor) -> Tensor:
    """(N, H * W, C) as (N, C, H, W) of the size of this image and in its layout; a view where that is channels-last."""
    made = as_image(rows, *image.shape[2:])
    return made if channels_last(image) else made.contiguous()


def channels_last(image: Tensor) -> bool:
    """Whether it has this layout."""
    return image.is_contiguous(memory_format=torch.channels_last)


def keep_channel_stats(result: tuple[Tensor, Tensor | None]) -> Tensor:
    """The image of an op that returns (image, channel stats); the stats are noted on the image until it changes."""
    image, channel_stats = result
    if channel_stats is not None and not image.is_inference():  # an inference tensor does not tell when it changes
        TensorNotes.begin(image).channel_stats = channel_stats
    return image


def channel_stats_of(x: Tensor) -> Any:
    """The stats of the pass that wrote x; None where they are not known, or x has changed since."""
    notes = TensorNotes.valid(x)
    return None if notes is None else notes.channel_stats


def normalize(kernels: Kernels, x: Tensor, norm: nn.GroupNorm, eps: float | None = None, **more: Any) -> Tensor:
    """The fused group norm with the module's settings, and the channel stats of x where they are known.

    Frames, (N, C, T, H, W), are normed as one image of all their rows. eps: in the place of the module's.
    """
    known = channel_stats_of(x)
    if known is not None:
        more["channel_stats"] = known
    image = as_one_image(x)
    eps = norm.eps if eps is None else eps
    y = kernels.group_norm(image, norm.num_groups, norm.weight, norm.bias, eps, **more)
    return y if image is x else y.unflatten(2, x.shape[2:4])


def convolve(x: Tensor, conv: Any, deferred: bool = True) -> tuple[Tensor, Tensor | None]:
    """The convolution and the bias that is still to be added, None where deferred is false.

    On CUDA, torch adds the bias in a pass of its own over the image; the next fused op can do it for nothing. On CPU
    the convolution adds it for nothing itself.
    """
    if keeps_forward(conv):
        return conv(x), None
    deferred = deferred and x.is_cuda
    bias = None if deferred else conv.bias
    y = conv._conv_forward(x, conv.weight, bias)  # as its forward does, with the padding mode the user chose
    return y, conv.bias if deferred else None


def project(rows: Tensor, image: Tensor, layer: nn.Module, bias: bool = True, linear: Callable = F.linear) -> Tensor:
    """A linear layer, or a 1x1 convolution taken as one, over (..., C), the rows of an image of these sizes."""
    if keeps_forward(layer) and isinstance(base(layer), nn.Conv2d):
        return as_rows(nhwc(layer(as_image_like(rows, image))))
    if isinstance(layer, nn.Conv2d):
        return linear(rows, layer.weight.flatten(1), layer.bias if bias else None)
    return product(layer, rows, bias, linear)


def coarser_as_convolution(x: Tensor) -> bool:
    """Whether torch rounds float32 to TF32 in convolutions alone; products are exact then, and several times slower."""
    return x.is_cuda and x.dtype is torch.float32 and convolutions_in_tf32() and not products_in_tf32()


def project_image(x: Tensor, conv: nn.Conv2d, linear: Callable = F.linear) -> Tensor:
    """A 1x1 convolution over a channels-last image, as a matrix product, unless stock's may be in TF32 and that not."""
    if keeps_forward(conv):
        return conv(x)
    if not pointwise(conv) or not channels_last(x) or coarser_as_convolution(x):
        return conv.forward(x)
    return as_image(project(as_rows(x), x, conv, linear=linear), *x.shape[2:])


FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the dimensions of a weight


def over_video(module: nn.Module) -> TypeGuard[nn.Conv3d]:
    """Whether it is a convolution over frames, rows and columns; one that cuts a video into patches is none."""
    return isinstance(module, nn.Conv3d) and module.kernel_size != module.stride


class ChannelsLast:
    """Stores 4-D weights as (out, height, width, in), and 5-D weights as (out, frames, height, width, in).

    In place: same Parameter, same values, other strides.

    everywhere: not on GPUs alone. Without it, on a CPU, they stay: convolutions would hand channels-last images to
    stock code, and torch's own group norm over those is wrong there, far from zero.
    """

    def __init__(self, root: nn.Module, modules: Sequence[nn.Conv2d | nn.Conv3d], everywhere: bool = False):
        self.root, self.modules, self.everywhere = root, tuple(modules), everywhere
        self.strides: dict[int, tuple[int, ...]] = {}
        self.on_gpu = False

    @staticmethod
    def lies_on_gpu(weight: Tensor) -> bool:
        return weight.is_cuda

    def follow(self, device: torch.device) -> None:
        """The model is called on this device, to which it may have been moved since."""
        if device.type in ("cuda", "cpu") and (device.type == "cuda") is not self.on_gpu and not self.everywhere:
            with alone_if_idle(self.root) as free:  # else at another call
                if free and self.on_gpu:
                    self.undo()
                elif free:
                    self.apply()

    def apply(self, coming: bool = False) -> None:
        """coming: the model is about to be moved to a GPU."""
        weights = [module.weight for module in self.modules]
        self.on_gpu = coming or any(map(self.lies_on_gpu, weights))
        for index, weight in enumerate(weights):
            if not (self.everywhere or coming or self.lies_on_gpu(weight)):
                continue
            if not weight.is_meta and not weight.is_contiguous(memory_format=FORMATS[weight.dim()]):
                self.strides[index] = weight.stride()
                set_data(weight, lambda data: data.contiguous(memory_format=FORMATS[data.dim()]))

    def check(self) -> None:
        """A layout the user changed since is theirs; undo leaves it alone."""

    def undo(self) -> None:
        for index, strides in self.strides.items():
            weight = self.modules[index].weight
            if weight.is_contiguous(memory_format=FORMATS[weight.dim()]):
                set_data(weight, lambda data, strides=strides: copy_with_strides(data, strides))
        self.strides, self.on_gpu = {}, False


def copy_with_strides(data: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy that lies in memory so."""
    return torch.empty_strided(data.shape, strides, dtype=data.dtype, device=data.device).copy_(data)
