"""How `hopper_gemm` divides a product: tiles, and the ring of steps of K through which they are loaded."""

from typing import NamedTuple

STEP = 128  # bytes of a row in a step of K: a tensor map's widest swizzle
PIECE = 64  # columns of a tile that are written at a time
SLOTS = 2  # pieces of a warpgroup in shared memory: one is read by its store while the next is made
SPARE = 2048  # bytes of shared memory for barriers, alignment, and what the compiler hands to warpgroups


class HopperTile(NamedTuple):
    """rows: 128; or 256 where columns are at most 128. columns: rows of the weight, and of a gate's: 64, 128 or 256;
    with a gate not 64. stages: steps of K in the ring.

    lead: steps by which the first warpgroup is ahead of the second, fewer than stages, so that one multiplies while the
    other writes. group: rows of tiles that walk along the columns together. parts: of K, into how many at most tiles of
    a last round are split that not all processors have one of; 1 for none. turns: whether warpgroups take whole tiles
    in turn, of at most 128 rows and columns, rather than half the rows of each.
    """

    rows: int
    columns: int
    stages: int
    lead: int
    group: int
    parts: int = 1
    turns: int = 0

    @property
    def height(self) -> int:
        """Rows of a warpgroup's."""
        return self.rows if self.turns else self.rows // 2

    @property
    def bytes(self) -> int:
        """Of shared memory."""
        return self.stages * STEP * (self.rows + self.columns) + 2 * SLOTS * PIECE * 2 * self.height + SPARE

    @property
    def name(self) -> str:
        return " ".join(map(str, self))

    def count(self, rows: int, columns: int) -> int:
        """Tiles of a product; columns: rows of the weight, with a gate's."""
        return -(-rows // self.rows) * -(-columns // self.columns)


WIDE, SQUARE, NARROW = HopperTile(128, 256, 4, 2, 16), HopperTile(128, 128, 6, 2, 16), HopperTile(128, 64, 8, 2, 16)
TURNS = HopperTile(128, 128, 5, 0, 16, turns=1)
TILES = (WIDE, WIDE._replace(parts=8), TURNS, TURNS._replace(parts=8), SQUARE, SQUARE._replace(parts=8), NARROW)
# Time of a tile: small ones read more for their arithmetic; instructions of 64 columns wait for shared memory (H200).
EFFORT = {256: 1.0, 128: 0.52, 64: 0.46}
LEAST_STEPS = 8  # of K to a part
EXCHANGE = 8  # steps of K that take as long as writing sums of parts and adding them up


def fitting(gate: bool, promoted: bool) -> list[HopperTile]:
    """The tiles that such a product can take. promoted: whether sums of a step are added to others in registers."""
    tiles = [tile for tile in TILES if tile.columns >= 128 * gate]
    return [tile for tile in tiles if tile.height * tile.columns <= 64 * 128] if promoted else tiles


def by_size(rows: int, columns: int, steps: int, gate: bool, promoted: bool, processors: int) -> HopperTile:
    """The tile of the fewest rounds, each by its effort. columns: rows of the weight, with a gate's. steps: of K."""

    def time(tile: HopperTile) -> float:
        tiles = tile.count(rows, columns)
        whole, parts = split(tiles, steps, processors, tile.parts)
        rounds = -(-whole // processors) + _last_round(tiles - whole, steps, processors, parts)
        return rounds * EFFORT[tile.columns]

    return min(fitting(gate, promoted), key=time)


def _last_round(rest: int, steps: int, processors: int, parts: int) -> float:
    """How long so many tiles take, each in so many parts, in times of one that is whole."""
    return -(-rest * parts // processors) / parts + (EXCHANGE / steps if parts > 1 else 0.0)


def split(tiles: int, steps: int, processors: int, most: int) -> tuple[int, int]:
    """How many tiles are multiplied whole, and into how many parts of K, at most `most`, the rest are split, or 1."""
    rest = tiles % processors
    tried = range(1, min(most, steps // LEAST_STEPS) + 1)
    parts = min(tried, key=lambda parts: _last_round(rest, steps, processors, parts), default=1)
    parts = -(-steps // -(-steps // parts))  # none without a step
    return (tiles, 1) if rest == 0 or parts == 1 else (tiles - rest, parts)
