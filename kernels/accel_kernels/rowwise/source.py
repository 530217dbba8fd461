"""The text of a kernel for one row program: a straight line of Triton, the same text for the same program.

A register is a tile (rows, lanes), or several that follow one another. Where lanes move, a full register is two tiles
instead of each: of even and odd lanes, or of the two halves. So a move costs nothing but names. All tiles have one
shape: Triton then lays them out alike, and no value goes from thread to thread.
"""

import math
from typing import NamedTuple

import torch

from accel_kernels.rowwise.operations import KEEPS, NEAR, OPERATIONS, ROUNDED
from accel_kernels.rowwise.program import (
    FULL,
    NORMS,
    NUMBERS,
    ONE,
    RowOp,
    RowProgram,
    lanes,
    register_widths,
    rounded_alone,
)
from accel_kernels.rowwise.row_numbers import LEAST_PEAK
from accel_kernels.rowwise.tiling import HALVES, PAIRS, PLAIN, Access, Tiling, form_of
from accel_kernels.sizes import cdiv

EARLY = 6  # inputs that are read before anything is computed, so that no reduction stands between; the others at use


class Register(NamedTuple):
    """The names of its tiles (one for a register of one lane), and the dtype to which its values are rounded."""

    width: str
    tiles: tuple[str, ...]
    dtype: torch.dtype


class TilePlace(NamedTuple):
    """Where a tile lies in its row: which part, its lanes by name, and how many."""

    part: int
    lanes: str
    count: int


class Source:
    """Writes the text; `text` is it. early: it starts before the kernel in front has ended, and waits for that.
    by_hand: numbers are rounded to float8 by hand, see `nearest_float8`.
    """

    def __init__(
        self,
        program: RowProgram,
        inputs: tuple[Access, ...],
        outputs: tuple[Access, ...],
        tiling: Tiling,
        early: bool = False,
        by_hand: bool = False,
    ):
        self.program, self.tiling, self.by_hand = program, tiling, by_hand
        self.inputs = [(f"x{n}", one) for n, one in enumerate(inputs)]
        self.outputs = [(f"y{n}", one) for n, one in enumerate(outputs)]
        self.dims = len(inputs[0].moves)
        self.widths, self.near = register_widths(program), rounded_alone(program)
        self.form = form_of(program)
        self.units = program.width if self.form == PLAIN else program.width // 2  # lanes or pairs that tiles count
        self.ragged = tiling.block * tiling.parts * tiling.split > self.units
        # Every row of a tile is there.
        self.filled = tiling.rows == 1 or (tiling.inner and tiling.side > 0 and tiling.side % tiling.rows == 0)
        self.lines: list[str] = ["tl.extra.cuda.gdc_wait()"] * early
        self.registers: dict[int, Register] = {}
        self.unused: set[int] = set()  # inputs that are still as they are in memory
        self._index()
        used = [arg for op in program.ops for arg in op.args] + list(program.results)
        for number in [n for n in dict.fromkeys(used) if n < len(inputs)][:EARLY]:
            self._load(number)
        for number, op in enumerate(program.ops, len(inputs)):
            self._apply(number, op)
        for number, register in enumerate(program.results):
            self._store(number, register)
        body = "\n".join(f"    {line}" for line in self.lines)
        self.text = f"def rowwise_kernel({', '.join(self._parameters())}):\n{body}\n"

    def _parameters(self) -> list[str]:
        """Each pointer and the strides that its tensor has, in its unit; then sizes, the innermost first."""
        found = []
        for name, access in self.inputs + self.outputs:
            found += [f"{name}_ptr", *(f"{name}_s{d}" for d, moves in enumerate(access.moves) if moves)]
            found += [f"{name}_lane"] * (access.lanes < 0)
        return found + [f"n{d}" for d in range(self.dims)]

    def _index(self) -> None:
        """The rows and lanes of this program, and which of them are there."""
        rows, split, block = self.tiling.rows, self.tiling.split, self.tiling.block
        line = self.lines.append
        line(f"pid = tl.program_id(0){'.to(tl.int64)' if self.tiling.wide else ''}")
        if split > 1:
            line(f"lane_tile = (pid % {split}).to(tl.int32)")
            line(f"pid = pid // {split}")
        side = self.tiling.side or "n0"
        within = f" * {rows} + tl.arange(0, {rows})[:, None]" if rows > 1 else ""
        last = self.dims - 1
        if self.tiling.inner and last:
            tiles = f"({side} + {rows - 1}) // {rows}" if side == "n0" else cdiv(self.tiling.side, rows)
            line(f"i0 = pid % ({tiles}){within}")
            line(f"rest = pid // ({tiles})")
        else:
            line(f"rest = pid{within}")
            if last:
                line(f"i0 = rest % {side}")
                line(f"rest = rest // {side}")
        for d in range(1, last):
            line(f"i{d} = rest % n{d}")
            line(f"rest = rest // n{d}")
        line(f"i{last} = rest")
        if rows > 1:
            checked = 0 if self.tiling.inner else last
            if not self.filled:
                line(f"there = i{checked} < n{checked}")
            line(f"every = tl.zeros([{rows}, 1], tl.int32)")
        line("one = tl.arange(0, 1)[None, :]")
        for p in range(self.tiling.parts):
            for name, factor in (("c", 1), ("d", 2))[: 2 if self.form == PAIRS else 1]:
                size = factor * block
                first = f"lane_tile * {size} + " if split > 1 else f"{p * size} + " if p else ""
                line(f"{name}{p} = {first}tl.arange(0, {size})[None, :]")
                if self.ragged:
                    line(f"{name}{p}_in = {name}{p} < {factor * self.units}")

    def _base(self, name: str, access: Access) -> str:
        """Where the rows of a tile begin."""
        terms = [f"i{d} * {name}_s{d}" for d, moves in enumerate(access.moves) if moves]
        unit = f" * {access.unit}" if access.unit > 1 else ""
        found = f"{name}_ptr + ({' + '.join(terms)}){unit}" if terms else f"{name}_ptr"
        return f"{found} + every" if self.tiling.rows > 1 else found

    def _mask(self, name: str, access: Access, lane: str) -> str:
        """The mask of a tile; `lane` is empty for a tile of one lane."""
        masks = ["there"] * (not self.filled and any(access.moves)) + [f"{lane}_in"] * (self.ragged and lane != "")
        return " & ".join(masks)

    def _places(self, width: str) -> list[TilePlace]:
        """Of every tile of a register."""
        if width == ONE:
            return [TilePlace(-1, "one", 1)]
        places, block = [], self.tiling.block
        for p in range(self.tiling.parts):
            names = [f"c{p}"]
            if width == FULL and self.form == HALVES:
                names = [f"c{p}", f"c{p} + {self.units}"]
            if width == FULL and self.form == PAIRS:
                names = [f"c{p} * 2", f"c{p} * 2 + 1"]
            places += [TilePlace(p, name, block) for name in names]
        return places

    def _in_pairs(self, width: str, access: Access) -> bool:
        """Whether even and odd lanes are read and written together."""
        return self.form == PAIRS and width == FULL and access.lanes == 1

    def _address(self, name: str, access: Access, place: TilePlace) -> str:
        if place.part < 0 or access.lanes == 0:
            return f"{name}_at + one"
        far = ".to(tl.int64)" if self.tiling.wide else ""
        factor = {1: "", 2: " * 2", -1: f"{far} * {name}_lane"}[access.lanes]
        return f"{name}_at + {self._repeated(access, f'({place.lanes})')}{factor}"

    @staticmethod
    def _repeated(access: Access, lane: str) -> str:
        return f"({lane} % {access.period})" if access.period else lane

    def _load(self, number: int) -> None:
        (name, access), width, rows = self.inputs[number], self.widths[number], self.tiling.rows
        line = self.lines.append
        line(f"{name}_at = {self._base(name, access)}")
        places = self._places(width)
        tiles = tuple(f"r{number}_{n}" for n in range(len(places)))
        if self._in_pairs(width, access):
            for p in range(self.tiling.parts):
                read = self._read(f"{name}_at + {self._repeated(access, f'd{p}')}", self._mask(name, access, f"d{p}"))
                shape = f"{rows}, {self.tiling.block}, 2"
                line(f"{tiles[2 * p]}, {tiles[2 * p + 1]} = tl.split(tl.reshape({read}, {shape}))")
        else:
            for tile, place in zip(tiles, places, strict=True):
                alike = width == ONE or access.lanes == 0
                mask = self._mask(name, access, "" if alike else f"c{place.part}")
                read = self._read(self._address(name, access, place), mask)
                line(f"{tile} = tl.broadcast_to({read}, {rows}, {place.count})" if alike else f"{tile} = {read}")
        self.registers[number] = Register(width, tiles, access.dtype)
        self.unused.add(number)

    @staticmethod
    def _read(address: str, mask: str) -> str:
        return f"tl.load({address}, mask={mask})" if mask else f"tl.load({address})"

    def _register(self, number: int) -> Register:
        if number not in self.registers:
            self._load(number)
        if number in self.unused:  # fp32 from here on: until now as small as in memory
            self.unused.remove(number)
            if self.registers[number].dtype != torch.float32:
                self.lines += [f"{tile} = {tile}.to(tl.float32)" for tile in self.registers[number].tiles]
        return self.registers[number]

    def _apply(self, number: int, op: RowOp) -> None:
        args = [self._register(arg) for arg in op.args]
        width = self.widths[number]
        tiles = tuple(f"r{number}_{n}" for n in range(len(self._places(width))))
        values = self._values(op, args, len(tiles), number in self.near)
        exact = op.name in KEEPS and all(arg.dtype == op.dtype for arg in args)
        if number in self.near or op.name in NUMBERS or op.dtype == torch.float32:
            exact = True
        rounds = "{}" if exact else f"{ROUNDED[op.dtype]}.to(tl.float32)"
        self.lines += [f"{tile} = {rounds.format(value)}" for tile, value in zip(tiles, values, strict=True)]
        self.registers[number] = Register(width, tiles, op.dtype)

    def _values(self, op: RowOp, args: list[Register], count: int, near: bool) -> list[str]:
        """An expression for each tile of the result. near: by a formula that is off by some units of fp32."""
        x = args[0]
        if op.name in ("even", "first"):
            return list(x.tiles[0::2])
        if op.name in ("odd", "second"):
            return list(x.tiles[1::2])
        if op.name in ("interleave", "concatenate"):
            return [tile for pair in zip(x.tiles, args[1].tiles, strict=True) for tile in pair]
        size = lanes(x.width, self.program)
        if op.name in ("sum", "amax"):
            return [self._reduced(x, x.tiles, op.name)]
        if op.name == "peak":
            return [self._peak(x)]
        if op.name == "mean":
            return [f"{self._reduced(x, x.tiles)} * {literal(1 / size)}"]
        if op.name in NORMS:
            return self._normed(op, x, size)
        spread = [arg.tiles * count if arg.width == ONE else arg.tiles for arg in args]
        numbers = {"number": literal(op.number), "reciprocal": literal(1 / op.number) if op.number else 'float("inf")'}
        numbers["by_hand"] = str(self.by_hand)
        exact = OPERATIONS[op.name].formula or ""
        formula = NEAR.get(op.name, exact) if near else exact
        return [formula.format(*(tiles[n] for tiles in spread), **numbers) for n in range(count)]

    def _reduced(self, register: Register, tiles: tuple[str, ...], name: str = "sum") -> str:
        """The sum or the maximum over all lanes, of tiles that lie as the register's do; of their sum, tile by tile."""
        empty = "0.0" if name == "sum" else 'float("-inf")'
        all_of = ""
        for tile, place in zip(tiles, self._places(register.width), strict=True):
            inside = f"tl.where(c{place.part}_in, {tile}, {empty})" if self.ragged else tile
            both = f"{all_of} + {inside}" if name == "sum" else f"larger({all_of}, {inside})"
            all_of = both if all_of else inside
        if name == "sum":
            return f"tl.sum({all_of}, axis=1, keep_dims=True)"
        return f"tl.reduce({all_of}, 1, larger, keep_dims=True)"

    def _peak(self, x: Register) -> str:
        found = tuple(f"tl.abs({tile})" for tile in x.tiles)
        largest = self._reduced(x, found, "amax")
        return f"tl.maximum(magnitude({largest}), {literal(LEAST_PEAK)})"  # NaN is as large as can be

    def _normed(self, op: RowOp, x: Register, size: int) -> list[str]:
        by, tiles = literal(1 / size), x.tiles
        if op.name == "layer_norm":
            self.lines.append(f"mean = {self._reduced(x, tiles)} * {by}")
            tiles = tuple(f"centered_{n}" for n in range(len(tiles)))
            self.lines += [f"{name} = {tile} - mean" for name, tile in zip(tiles, x.tiles, strict=True)]
        squares = tuple(f"squared_{n}" for n in range(len(tiles)))
        self.lines += [f"{name} = {tile} * {tile}" for name, tile in zip(squares, tiles, strict=True)]
        self.lines.append(f"scale = tl.rsqrt({self._reduced(x, squares)} * {by} + {literal(op.number)})")
        return [f"{tile} * scale" for tile in tiles]

    def _store(self, number: int, result: int) -> None:
        name, access = self.outputs[number]
        register, rounded = self._register(result), ROUNDED[access.dtype]
        self.lines.append(f"{name}_at = {self._base(name, access)}")
        places = self._places(register.width)
        if self._in_pairs(register.width, access):
            for p in range(self.tiling.parts):
                even, odd = register.tiles[2 * p : 2 * p + 2]
                value = f"tl.interleave({rounded.format(even)}, {rounded.format(odd)})"
                self._write(f"{name}_at + d{p}", value, self._mask(name, access, f"d{p}"))
            return
        for tile, place in zip(register.tiles, places, strict=True):
            mask = self._mask(name, access, "" if register.width == ONE else f"c{place.part}")
            self._write(self._address(name, access, place), rounded.format(tile), mask)

    def _write(self, place: str, value: str, mask: str) -> None:
        self.lines.append(f"tl.store({place}, {value}, mask={mask})" if mask else f"tl.store({place}, {value})")


def literal(number: float) -> str:
    """A number as it is in fp32."""
    value = torch.tensor(number, dtype=torch.float32, device="cpu").item()
    return repr(value) if math.isfinite(value) else f'float("{value}")'
