"""What every launcher needs: the number of multiprocessors to fill, and powers of two."""

from functools import lru_cache

import torch

# Triton's interpreter runs on CPU tensors; any count gives the same results there.
INTERPRETER_SMS = 4


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device."""
    if device.type != "cuda":
        return INTERPRETER_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def power_of_two(n: int) -> int:
    """The least power of two >= n."""
    return 1 << max(0, n - 1).bit_length()


def floor_power_of_two(n: int) -> int:
    """The greatest power of two <= n, for n >= 1."""
    return 1 << (n.bit_length() - 1)
