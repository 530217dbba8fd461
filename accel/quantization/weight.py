"""What code sees that asks a quantized linear for its weight: the values, and an error where it would change them."""

from typing import Any

import torch

SAME = {"detach", "requires_grad_"}  # and the attribute `data`: the same memory, to be guarded in turn
WRITES = {"__setitem__", "__set__"}
COPIES = {"__deepcopy__", "__reduce_ex__"}


class Reading(torch.Tensor):
    """A dequantized weight. It is made anew whenever it is asked for, so what is written into it would be lost."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: dict | None = None) -> Any:
        name, kwargs = function.__name__, kwargs or {}
        written = next(iter((*args, *kwargs.values())), None)
        inplace = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name in WRITES
        if isinstance(written, cls) and inplace and name not in SAME:
            raise RuntimeError(
                "the weight of a quantized linear cannot be changed, nor can adapters be merged into it; "
                "accel.restore(model) gives back the original weights"
            )
        with torch._C.DisableTorchFunctionSubclass():
            if name in COPIES:
                args = (args[0].as_subclass(torch.Tensor), *args[1:])
            result = function(*args, **kwargs)
            data = name == "__get__" and function.__self__ is torch.Tensor.data
            return result.as_subclass(cls) if data or name in SAME else result
