"""The numbers that draws come from: the published ones of the generator, and that they are uniform."""

import torch
from accel_kernels.sampling.philox import philox


def test_the_generator_gives_the_published_numbers():
    """Known answers of Random123, for counters and keys of zeros; the others by its own 64-bit arithmetic, in ints."""
    zero = torch.zeros(1, dtype=torch.int64)
    assert philox(zero, zero, zero).flatten().tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    seed, offset, counter = -(2**62) - 12345, 2**40 + 7, 2**31 + 3
    k, c = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], [counter, 0, offset & 0xFFFFFFFF, offset >> 32]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    found = philox(*(torch.tensor([value]) for value in (seed, offset, counter)))
    assert found.flatten().tolist() == c
