"""Sizes of blocks and grids."""


def power_of_two(n: int) -> int:
    """The least power of two >= n."""
    return 1 << max(0, n - 1).bit_length()


def floor_power_of_two(n: int) -> int:
    """The greatest power of two <= n, for n >= 1."""
    return 1 << (n.bit_length() - 1)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
