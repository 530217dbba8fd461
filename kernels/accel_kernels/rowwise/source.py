"""The text of a kernel for one row program: a straight line of Triton, the same text for the same program.

A kernel that walked the program itself would read it again at every launch, as a part of what it is compiled for.

A row is cut into parts of the powers of two that it needs. A register is a tile (rows, lanes) for each part; where
lanes move, a full register is two tiles for each part: of even and odd lanes, or of the first and the second half. So
a move costs nothing but the names of tiles. What does not depend on a row has tiles of one row.
"""

from typing import NamedTuple

import torch

from accel_kernels.rowwise.formulas import FORMULAS, KEEPS, larger_of, literal, rounding
from accel_kernels.rowwise.program import FULL, HALF, NORMS, ONE, RowOp, RowProgram, lanes, register_widths
from accel_kernels.rowwise.tiling import HALVES, PAIRS, PLAIN, Access, Tiling, form_of

EARLY = 6  # inputs that are read before anything is computed, so that no reduction stands between; the others at use


class Register(NamedTuple):
    """Names of the tiles of a register: for each part one, or two. One name alone for one lane.

    varies: whether it differs between the rows of a tile. dtype: of which it holds values.
    """

    width: str
    tiles: tuple[str, ...]
    varies: bool
    dtype: torch.dtype


class Source:
    """Writes the text; `text` is it."""

    def __init__(self, program: RowProgram, inputs: tuple[Access, ...], outputs: tuple[Access, ...], tiling: Tiling):
        self.program, self.tiling = program, tiling
        self.accesses = [(f"x{n}", one) for n, one in enumerate(inputs)]
        self.written = [(f"y{n}", one) for n, one in enumerate(outputs)]
        self.widths = register_widths(program)
        self.form = form_of(program)
        self.units = program.width if self.form == PLAIN else program.width // 2  # lanes or pairs that parts count
        self.lines: list[str] = []
        self.registers: dict[int, Register] = {}
        self.unused: set[int] = set()  # inputs that are still as they are in memory
        self._index()
        used = [arg for op in program.ops for arg in op.args] + list(program.results)
        order = [n for n in dict.fromkeys(used) if n < len(inputs)]
        for number in order[:EARLY]:
            self._load(number)
        for number, op in enumerate(program.ops, len(inputs)):
            self._apply(number, op)
        for number, register in enumerate(program.results):
            self._store(number, register)
        body = "\n".join(f"    {line}" for line in self.lines)
        self.text = f"def rowwise_kernel({', '.join(self.parameters())}):\n{body}\n"

    def parameters(self) -> list[str]:
        """Pointers, strides in the tensor's unit, then sizes, the innermost first."""
        found = []
        for name, access in self.accesses + self.written:
            found += [f"{name}_ptr", *(f"{name}_s{d}" for d, moves in enumerate(access.moves) if moves)]
            found += [f"{name}_lane"] * (access.lanes < 0)
        return found + [f"n{d}" for d in range(self.program_dims())]

    def program_dims(self) -> int:
        return len(self.accesses[0][1].moves)

    def _index(self) -> None:
        """The rows and lanes of this program, and what is beyond their end."""
        rows, wide, count = self.tiling.rows, ".to(tl.int64)" if self.tiling.wide else "", self.program_dims()
        line = self.lines.append
        line(f"pid = tl.program_id(0){wide}")
        if self.tiling.split > 1:
            line(f"lane_tile = (pid % {self.tiling.split}).to(tl.int32)")
            line(f"pid = pid // {self.tiling.split}")
        row = f" * {rows} + tl.arange(0, {rows})[:, None]" if rows > 1 else ""
        if self.tiling.inner and count > 1:
            line(f"tiles = (n0 + {rows - 1}) // {rows}" if rows > 1 else "tiles = n0")
            line(f"i0 = pid % tiles{row}")
            line("pid = pid // tiles")
        else:
            line(f"row = pid{row}")
            line("i0 = row % n0" if count > 1 else "i0 = row")
        rest = "pid" if self.tiling.inner and count > 1 else "row // n0"
        for d in range(1, count):
            if d < count - 1:
                line(f"rest = {rest}")
                line(f"i{d} = rest % n{d}")
                rest = f"rest // n{d}"
            else:
                line(f"i{d} = {rest}")
        if rows > 1:
            flat = not self.tiling.inner and count > 1
            line(f"there = i{count - 1} < n{count - 1}" if flat else "there = i0 < n0")
        line("one = tl.arange(0, 1)[None, :]")
        for p, (start, block) in enumerate(self.tiling.parts):
            for name, factor in [("c", 1), ("d", 2)] if self.form == PAIRS else [("c", 1)]:
                size = factor * block
                first = f"lane_tile * {size} + " if self.tiling.split > 1 else f"{factor * start} + " if start else ""
                line(f"{name}{p} = {first}tl.arange(0, {size})[None, :]")
                if self._ragged(p):
                    line(f"{name}{p}_in = {name}{p} < {factor * self.units}")

    def _ragged(self, part: int) -> bool:
        """Whether a part's tile has lanes beyond the end of the row."""
        start, block = self.tiling.parts[part]
        return start + block * self.tiling.split > self.units

    def _varies(self, access: Access) -> bool:
        """Whether a tensor differs between the rows of a tile."""
        if self.tiling.rows == 1:
            return False
        return access.moves[0] if self.tiling.inner else any(access.moves)

    def _base(self, name: str, access: Access) -> str:
        terms = [f"i{d} * {name}_s{d}" for d, moves in enumerate(access.moves) if moves]
        if not terms:
            return f"{name}_ptr"
        unit = f" * {access.unit}" if access.unit > 1 else ""
        return f"{name}_ptr + ({' + '.join(terms)}){unit}"

    def _mask(self, part: int, varies: bool, lane: str = "c") -> str:
        masks = ["there"] * varies + [f"{lane}{part}_in"] * (part >= 0 and self._ragged(part))
        return " & ".join(masks)

    def _lane(self, name: str, access: Access, index: str) -> str:
        by = {0: f"({index}) * 0", 1: f"({index})", 2: f"({index}) * 2", -1: f"({index}) * {name}_lane"}
        return by[access.lanes]

    def _places(self, width: str) -> list[tuple[int, str]]:
        """Of every tile of a register its part, -1 for one lane, and its lanes."""
        if width == ONE:
            return [(-1, "one")]
        places = []
        for p in range(len(self.tiling.parts)):
            if width == HALF or self.form == PLAIN:
                places.append((p, f"c{p}"))
            elif self.form == HALVES:
                places += [(p, f"c{p}"), (p, f"c{p} + {self.units}")]
            else:
                places += [(p, f"c{p} * 2"), (p, f"c{p} * 2 + 1")]
        return places

    def _load(self, number: int) -> None:
        name, access = self.accesses[number]
        width, varies = self.widths[number], self._varies(access)
        line = self.lines.append
        line(f"{name}_at = {self._base(name, access)}")
        tiles = []
        for part, index in self._places(width):
            tile = f"r{number}_{len(tiles)}"
            tiles.append(tile)
            paired = self.form == PAIRS and width == FULL and access.lanes == 1
            if paired and len(tiles) % 2 == 0:
                continue  # read with the one before
            if width != ONE and access.lanes == 0:
                block = self.tiling.parts[part][1]
                line(f"{tile} = {self._read(f'{name}_at + one', 'there' if varies else '')}")
                line(f"{tile} = tl.broadcast_to({tile}, {self.tiling.rows if varies else 1}, {block})")
            elif paired:
                shape = f"{self.tiling.rows if varies else 1}, {self.tiling.parts[part][1]}, 2"
                read = self._read(f"{name}_at + d{part}", self._mask(part, varies, "d"))
                line(f"{tile}, r{number}_{len(tiles)} = tl.split(tl.reshape({read}, {shape}))")
            else:
                at = "one" if width == ONE else self._lane(name, access, index)
                line(f"{tile} = {self._read(f'{name}_at + {at}', self._mask(part, varies))}")
        self.registers[number] = Register(width, tuple(tiles), varies, access.dtype)
        self.unused.add(number)

    @staticmethod
    def _read(place: str, mask: str) -> str:
        return f"tl.load({place}, mask={mask}, other=0.0)" if mask else f"tl.load({place})"

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
        varies = any(arg.varies for arg in args)
        tiles = [f"r{number}_{n}" for n in range(len(self._places(width)))]
        values = self._values(op, args, width, len(tiles))
        exact = op.name in KEEPS and all(arg.dtype == op.dtype for arg in args)
        rounds = "{}" if exact or op.dtype == torch.float32 else f"{rounding(op.dtype)}({{}}).to(tl.float32)"
        self.lines += [f"{tile} = {rounds.format(value)}" for tile, value in zip(tiles, values, strict=True)]
        self.registers[number] = Register(width, tuple(tiles), varies, op.dtype)

    def _values(self, op: RowOp, args: list[Register], width: str, count: int) -> list[str]:
        """An expression for each tile of the result."""
        if op.name in ("even", "first"):
            return list(args[0].tiles[0::2])
        if op.name in ("odd", "second"):
            return list(args[0].tiles[1::2])
        if op.name in ("interleave", "concatenate"):
            return [tile for pair in zip(args[0].tiles, args[1].tiles, strict=True) for tile in pair]
        if op.name in ("sum", "amax"):
            return [self._reduced(args[0], args[0].tiles, op.name)]
        size = lanes(args[0].width, self.program)
        if op.name == "mean":
            return [f"{self._reduced(args[0], args[0].tiles, 'sum')} * {literal(1 / size)}"]
        if op.name in NORMS:
            return self._normed(op, args[0], size)
        spread = [arg.tiles * count if arg.width == ONE else arg.tiles for arg in args]
        formula = FORMULAS[op.name]
        return [formula.format(*(tiles[n] for tiles in spread), number=literal(op.number)) for n in range(count)]

    def _reduced(self, register: Register, tiles: tuple[str, ...], name: str) -> str:
        """The sum or the maximum over all lanes, of tiles that lie as the register's do."""
        empty = "0.0" if name == "sum" else 'float("-inf")'
        by_block: dict[int, str] = {}
        for tile, (part, _) in zip(tiles, self._places(register.width), strict=True):
            inside = f"tl.where(c{part}_in, {tile}, {empty})" if self._ragged(part) else tile
            block = self.tiling.parts[part][1]
            before = by_block.get(block)
            if before is None:
                by_block[block] = inside
            else:  # two tiles are added before they are reduced
                by_block[block] = f"{before} + {inside}" if name == "sum" else larger_of(before, inside)
        if name == "sum":
            return "(" + " + ".join(f"tl.sum({tile}, axis=1, keep_dims=True)" for tile in by_block.values()) + ")"
        found = [f"tl.reduce({tile}, 1, larger, keep_dims=True)" for tile in by_block.values()]
        return found[0] if len(found) == 1 else larger_of(*found)

    def _normed(self, op: RowOp, x: Register, size: int) -> list[str]:
        line, by = self.lines.append, literal(1 / size)
        tiles = x.tiles
        if op.name == "layer_norm":
            line(f"mean = {self._reduced(x, tiles, 'sum')} * {by}")
            centered = [f"centered_{n}" for n in range(len(tiles))]
            for name, tile in zip(centered, tiles, strict=True):
                line(f"{name} = {tile} - mean")
            tiles = tuple(centered)
        for n, tile in enumerate(tiles):
            line(f"squared_{n} = {tile} * {tile}")
        squared = tuple(f"squared_{n}" for n in range(len(tiles)))
        line(f"scale = tl.rsqrt({self._reduced(x, squared, 'sum')} * {by} + {literal(op.number)})")
        return [f"{tile} * scale" for tile in tiles]

    def _store(self, number: int, result: int) -> None:
        name, access = self.written[number]
        register = self._register(result)
        varies, dtype = self._varies(access), rounding(access.dtype)
        rows = self.tiling.rows if varies else 1
        places = self._places(register.width)
        self.lines.append(f"{name}_at = {self._base(name, access)}")

        def block(part: int) -> int:
            return 1 if part < 0 else self.tiling.parts[part][1]

        if self.form == PAIRS and register.width == FULL and access.lanes == 1:
            for (even, odd), (part, _) in zip(zip(*[iter(register.tiles)] * 2, strict=True), places[::2], strict=True):
                two = [f"tl.broadcast_to({dtype}({tile}), {rows}, {block(part)})" for tile in (even, odd)]
                value = f"tl.interleave({two[0]}, {two[1]})"
                self._write(f"{name}_at + d{part}", value, self._mask(part, varies, "d"))
            return
        for tile, (part, index) in zip(register.tiles, places, strict=True):
            at = "one" if part < 0 else self._lane(name, access, index)
            value = f"tl.broadcast_to({dtype}({tile}), {rows}, {block(part)})"
            self._write(f"{name}_at + {at}", value, self._mask(part, varies))

    def _write(self, place: str, value: str, mask: str) -> None:
        self.lines.append(f"tl.store({place}, {value}, mask={mask})" if mask else f"tl.store({place}, {value})")
