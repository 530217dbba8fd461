"""Linears as bitsandbytes has them, in 4 bits."""

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


def four_bit(linear: nn.Linear, kind="nf4", nested=False, dtype=None, block=64, **more) -> nn.Linear:
    """dtype: in which it multiplies; of the linear's own unless told. block: numbers to a scale."""
    import bitsandbytes

    n, k = linear.weight.shape
    dtype = dtype or linear.weight.dtype
    made = bitsandbytes.nn.Linear4bit(k, n, False, compute_dtype=dtype, quant_type=kind, **more)
    weight = linear.weight.detach()
    data, state = bitsandbytes.functional.quantize_4bit(
        weight, blocksize=block, compress_statistics=nested, quant_type=kind
    )
    settings = {"quant_type": kind, "blocksize": block, "compress_statistics": nested, "bnb_quantized": True}
    made.weight = bitsandbytes.nn.Params4bit(data, False, state, module=made, **settings)
    made.quant_state, made.bias = state, linear.bias
    return made.eval()


def as_elsewhere(monkeypatch) -> None:
    """No CPU has the instructions for which bitsandbytes packs weights in another way at a call."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)


class Calls(TorchDispatchMode):
    """Inside, how many of bitsandbytes' own products run."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.namespace == "bitsandbytes"
        return function(*args, **kwargs or {})
