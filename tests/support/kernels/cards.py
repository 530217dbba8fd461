"""Cards that nobody has: of each generation, by published sizes, small and large ones, as people have them."""

from accel_kernels.device import ROOM, Card

GB = 10**9


def made_up(arch: int, processors: int = 132, memory: int = 0, **more) -> Card:
    """A card of a generation, by its published sizes. arch: 90 for 9.0. memory: GB."""
    compute = divmod(arch, 10)
    return Card(f"sm_{arch}", compute, processors, ROOM[compute] * 1024, memory * GB, **more)


CARDS = tuple(
    made_up(arch, *sizes)
    for arch, *sizes in (
        (75, 30, 8), (75, 72, 24), (80, 108, 40), (86, 28, 12), (86, 82, 24), (89, 34, 8), (89, 128, 24), (90, 132, 80),
        (100, 148, 180), (120, 36, 12), (120, 84, 16), (120, 170, 32),
    )
)  # fmt: skip
