"""Uniform numbers that are a function of a seed and a count: Philox4x32-10 by Salmon, Moraes, Dror and Shaw 2011.

What a request draws so depends on nothing but itself: neither on the others in the batch nor on their order.
"""

import torch

# Multipliers of a round, and what the key grows by after it.
ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
KEY_A, KEY_B = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
LOW = 0xFFFFFFFF


def philox(seeds: torch.Tensor, offsets: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Words of 32 bits in int64: (N, C, 4), of seeds and offsets (N,) and counters (C,), all int64.

    Key: the seed, low word first. Counter: (counter, 0, low word of the offset, high word of the offset).
    """
    n, c = len(seeds), len(counters)
    k0, k1 = ((seeds >> shift & LOW)[:, None] for shift in (0, 32))
    c0, c1 = (counters & LOW).expand(n, c), torch.zeros((), dtype=torch.int64, device=counters.device)
    c2, c3 = ((offsets >> shift & LOW)[:, None] for shift in (0, 32))
    for _ in range(ROUNDS):
        a, b = c0 * ROUND_A, c2 * ROUND_B  # modulo 2**64
        c0, c1, c2, c3 = (b >> 32 & LOW) ^ c1 ^ k0, b & LOW, (a >> 32 & LOW) ^ c3 ^ k1, a & LOW
        k0, k1 = k0 + KEY_A & LOW, k1 + KEY_B & LOW
    return torch.stack([c0, c1, c2, c3], dim=-1)


def uniform(seeds: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """(N,) fp64 in (0, 1), of seeds and offsets (N,) int64: (the first 52 bits of counter 0 + 1/2) / 2**52.

    So many bits that a token of any probability that fp32 holds beside others is drawn as often as it should be.
    """
    words = philox(seeds, offsets, seeds.new_zeros(1))[:, 0]
    return ((words[:, 0] << 20 | words[:, 1] >> 12).double() + 0.5) * 2.0**-52
