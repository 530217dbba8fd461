"""Powers of two, which block sizes are, and where kernels run."""

import os


def power_of_two(n: int) -> int:
    """The least power of two >= n."""
    return 1 << max(0, n - 1).bit_length()


def floor_power_of_two(n: int) -> int:
    """The greatest power of two <= n, for n >= 1."""
    return 1 << (n.bit_length() - 1)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which knows no Gluon."""
    return os.environ.get("TRITON_INTERPRET") == "1"
