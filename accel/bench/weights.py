"""Models with random weights, made where and as they are used: no copy in float32, none in main memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

SEED = 0


class EmptyInDtype(TorchFunctionMode):
    """Inside, `torch.empty` without a dtype gives this one: weights of linear layers and convolutions begin with it.

    The default dtype stays: constants such as frequencies of rotary embeddings are computed in it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("dtype") is None:
            kwargs["dtype"] = self.dtype
        return func(*args, **kwargs)


def random_model(
    class_name: str, config: dict, device: torch.device, dtype: torch.dtype, drawn: bool = True
) -> nn.Module:
    """A model of diffusers in evaluation mode, the same for the same device and dtype. drawn: see `draw_weights`.

    Parts that its class names in `_keep_in_fp32_modules` are in float32, as `from_pretrained` leaves them.
    """
    import diffusers

    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(SEED)
        with torch.device(device), EmptyInDtype(dtype if drawn else torch.float32):
            module = getattr(diffusers, class_name)(**config)
        kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(torch.float32 if kept.intersection(name.split(".")) else dtype)
        for part in module.modules():
            part._buffers.update({name: _alone(buffer) for name, buffer in part._buffers.items()})
        if drawn:
            draw_weights(module)
    return module.eval().requires_grad_(False)


def random_transformer(class_name: str, config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A model of transformers in evaluation mode, the same for the same device and dtype."""
    import transformers

    torch.manual_seed(SEED)
    with device:
        model = getattr(transformers, class_name)(config)
    return model.to(dtype).eval().requires_grad_(False)


def _alone(buffer: torch.Tensor | None) -> torch.Tensor | None:
    """A buffer that is no view: a view keeps the tensor in float32 that it was made from, which no loaded model has."""
    return buffer if buffer is None or buffer._base is None else buffer.detach().clone()


@torch.no_grad()
def draw_weights(module: nn.Module) -> None:
    """Draws every parameter anew, so that none is zero or one and hides what comes behind it.

    Matrices and kernels keep the size of what they multiply: normal numbers by the root of the fan-in. Weights of norms
    lie around 1, biases around 0. So gates and modulations are of the size of 1, and sums of many blocks stay finite.
    """
    for name, parameter in module.named_parameters():
        if parameter.numel() > max(parameter.shape, default=1):
            parameter.normal_(std=(parameter.shape[0] / parameter.numel()) ** 0.5)
        elif name.endswith("bias"):
            parameter.normal_(std=0.1)
        else:
            parameter.normal_(mean=1.0, std=0.1)
