"""Gumbel noise that is a function of a seed, a count and a place: Philox4x32-10 by Salmon, Moraes, Dror and Shaw 2011.

What a request draws so depends on nothing but itself: neither on the others in the batch nor on their order.
"""

import torch

# Multipliers of a round, and what the key grows by after it.
ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
KEY_A, KEY_B = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
LOW = 0xFFFFFFFF

OUTPUTS = 4  # words from each counter
# Below it -log(1 - v) is a series, as 1 - v would round away the digits of v.
SERIES_BELOW = 0.0625
LARGEST = 1.0 - 2.0**-24  # of the uniform numbers in fp32 that are below one


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


def gumbel(words: torch.Tensor) -> torch.Tensor:
    """-log(E) in fp32, where E = -log(1 - v) is exponential and v = (word + 1/2) / 2**32.

    E is drawn with 32 bits near zero, where the largest noise comes from: with 24, tokens of probability 1e-7 would
    be drawn too seldom. It is never 0 and never infinite.
    """
    v = ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp_max(LARGEST)
    series = v * (1.0 + v * (0.5 + v * (1 / 3 + v * (0.25 + v * (0.2 + v * (1 / 6))))))
    return -torch.log(torch.where(v < SERIES_BELOW, series, -torch.log(1.0 - v)))


def noise_of(seeds: torch.Tensor, offsets: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """(N, vocabulary) fp32: place v has word v % 4 of counter v // 4."""
    counters = torch.arange(-(-vocabulary // OUTPUTS), device=seeds.device)
    return gumbel(philox(seeds, offsets, counters).flatten(1)[:, :vocabulary])
