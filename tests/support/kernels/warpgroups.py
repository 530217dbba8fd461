"""Gluon kernels of Hopper run as plain Python over numpy in float64, one program after the other.

What is asynchronous happens as late as it may, a product when it is waited for, a load when its barrier is; or a load
at once. So a buffer that is loaded anew too early, or read too early, gives wrong sums, and a wait for what no load
completes raises. Where registers lie is the compiler's business: conversions of layouts change nothing here.
"""

from types import FunctionType, SimpleNamespace

import numpy as np
import torch


class Array:
    """A block of values as Gluon has it: operators broadcast, methods have Gluon's names."""

    dtype, type = "dtype", SimpleNamespace(layout=None)

    def __init__(self, data):
        self.data = np.asarray(data)

    def __getattr__(self, name):
        if name in ("shape", "__index__", "__int__"):
            return getattr(self.data, name)
        raise AttributeError(name)

    def __index__(self):
        return int(self.data)

    def __bool__(self):
        return bool(self.data)

    def to(self, dtype, bitcast=False):
        return Array(self.data.astype(np.int64) if self.data.dtype == bool else self.data)

    def reshape(self, shape):
        return Array(self.data.reshape(shape))

    def permute(self, order):
        return Array(self.data.transpose(order))


def plain(value):
    return value.data if isinstance(value, Array) else np.asarray(value)


def _operator(name):
    def apply(self, other):
        return Array(getattr(self.data, name)(plain(other)))

    return apply


_OPERATORS = "add sub mul floordiv mod and or rshift lt le gt ge eq radd rsub rmul rfloordiv rmod rand ror truediv"
for _name in _OPERATORS.split():
    setattr(Array, f"__{_name}__", _operator(f"__{_name}__"))
Array.__neg__ = lambda self: Array(-self.data)
Array.__invert__ = lambda self: Array(~self.data)
Array.__xor__ = lambda self, bits: Array(self.data.astype(np.int64) ^ bits)
Array.__hash__ = None


class Pointer:
    """Memory and offsets into it."""

    class dtype:
        element_ty = "element"

    def __init__(self, memory, offsets=0):
        self.memory, self.offsets = memory, np.asarray(offsets, np.int64)

    def __add__(self, more):
        return Pointer(self.memory, self.offsets + plain(more))

    def to(self, dtype):
        """Of bytes, to words of them."""
        return Pointer(self.memory.astype(np.uint8).view(np.uint32).astype(np.int64), self.offsets // 4)


class Ring:
    """Shared memory, or a buffer of it."""

    layout = None

    def __init__(self, data, dtype=None):
        self.data, self.dtype = data, dtype

    @property
    def shape(self):
        return self.data.shape

    def index(self, slot):
        assert 0 <= int(slot) < len(self.data)
        return Ring(self.data[int(slot)], self.dtype)

    def permute(self, order):
        return Ring(self.data.transpose(order), self.dtype)

    def slice(self, start, length, dim):
        return Ring(self.data[start : start + length] if dim == 0 else self.data[:, start : start + length])

    def reinterpret(self, dtype, shape, layout):
        return Ring(self.data.reshape(shape), dtype)

    def load(self, layout):
        return Array(self.data.copy())

    def store(self, values):
        self.data[...] = values.data


class Barriers:
    def __init__(self, every):
        self.all = list(every)

    def index(self, slot):
        assert 0 <= int(slot) < len(self.all)
        return self.all[int(slot)]


class Barrier:
    def __init__(self):
        self.phase, self.owed, self.expected, self.loads = 0, 0, False, []

    def wait(self, parity):
        assert self.phase % 2 == int(parity), "a wait for a phase that is over"
        assert self.expected, "a wait for what nothing loads"
        for load in self.loads:
            load()
        assert self.owed == 0, f"{self.owed} bytes expected that no load brings"
        self.phase, self.expected, self.loads = self.phase + 1, False, []


class Descriptor:
    """A matrix in memory and the box that a copy moves. size: bytes that an element counts."""

    layout = None

    def __init__(self, data, box, size, dtype="dtype"):
        self.data, self.dtype, self.size = data, dtype, size
        self.block_type = SimpleNamespace(shape=list(box), nbytes=box[0] * box[1] * size)

    def part(self, place):
        row, column = (int(one) for one in place)
        high, wide = self.block_type.shape
        return self.data[row : row + high, column : column + wide]

    def loading(self, place, buffer):
        """What fills the buffer with the box at this place, zeros where there is no matrix."""

        def load():
            found = self.part(place)
            buffer.data[...] = 0
            buffer.data[: found.shape[0], : found.shape[1]] = found

        return load


class Gluon:
    """Stands for the module `gl`, and for the instructions of Hopper; `memory` is what programs share."""

    constexpr = object
    int8 = int16 = int32 = int64 = float32 = float16 = bfloat16 = "dtype"
    minimum = staticmethod(lambda a, b: Array(np.minimum(plain(a), plain(b))))
    maximum = staticmethod(lambda a, b: Array(np.maximum(plain(a), plain(b))))
    where = staticmethod(lambda mask, a, b: Array(np.where(plain(mask), plain(a), plain(b))))
    cdiv = staticmethod(lambda a, b: -(-a // b))
    join = staticmethod(lambda a, b: Array(np.stack((a.data, b.data), -1)))
    split = staticmethod(lambda a: (Array(a.data[..., 0]), Array(a.data[..., 1])))
    expand_dims = staticmethod(lambda a, axis: Array(np.expand_dims(a.data, axis)))
    arange = staticmethod(lambda start, end, layout=None: Array(np.arange(start, end)))
    zeros = staticmethod(lambda shape, dtype, layout: Array(np.zeros(shape)))
    full = staticmethod(lambda shape, value, dtype, layout: Array(np.full(shape, value)))
    gather = staticmethod(lambda a, index, axis: Array(a.data[index.data.astype(int)]))
    sum = staticmethod(lambda a, axis: Array(a.data.sum(axis)))
    rsqrt = staticmethod(lambda a: Array(a.data**-0.5))
    mma_v2 = staticmethod(lambda left, right, acc: Array(acc.data + left.data @ right.data))
    convert_layout = staticmethod(lambda value, layout, assert_trivial=False: value)
    static_range = staticmethod(range)

    def __init__(self, at_once):
        self.at_once, self.program, self.programs, self.pending = at_once, 0, 1, []

    def __getattr__(self, name):  # layouts
        return lambda *args, **more: None

    def program_id(self, axis):
        return Array(self.program[axis] if isinstance(self.program, tuple) else self.program)

    def triton(self, waiting):
        """What kernels name of `triton.language`. waiting: of `tl.extra.cuda`."""
        return SimpleNamespace(
            load=self.load, store=self.store, float32=self.float32, extra=SimpleNamespace(cuda=waiting)
        )

    def num_programs(self, axis):
        return Array(self.programs)

    def load(self, pointer, mask=True, other=0.0, cache_modifier=None, eviction_policy=None):
        mask = np.broadcast_to(plain(mask), np.broadcast_shapes(np.shape(plain(mask)), pointer.offsets.shape))
        at = np.where(mask, pointer.offsets, 0)
        found = pointer.memory[at]
        return Array(np.where(mask, found, np.asarray(other, found.dtype)))

    def store(self, pointer, value, mask=True):
        offsets, values, mask = np.broadcast_arrays(pointer.offsets, plain(value), plain(mask))
        pointer.memory[offsets[mask]] = values[mask]

    def atomic_add(self, pointer, value, sem):
        before = pointer.memory[int(pointer.offsets)]
        pointer.memory[int(pointer.offsets)] += value
        return Array(before)

    def allocate_shared_memory(self, dtype, shape, layout):
        return Barriers(Barrier() for _ in range(shape[0])) if shape[1:] == [1] else Ring(np.full(shape, np.nan))

    def init(self, barrier, count):
        assert count == 1

    def expect(self, barrier, size, pred):
        if pred:
            assert not barrier.expected, "a barrier expects before its phase is over"
            barrier.expected, barrier.owed = True, size

    def wait(self, barrier, parity):
        barrier.wait(parity)

    def start_load(self, descriptor, place, barrier, ring, pred):
        if not pred:
            return
        load = descriptor.loading([int(one) for one in place], ring)
        assert barrier.expected, "a load that no barrier expects"
        barrier.owed -= descriptor.block_type.nbytes
        if self.at_once:
            load()
        else:
            barrier.loads.append(load)

    def warpgroup_mma(self, left, right, acc, is_async, use_acc=True):
        acc = acc if use_acc else Array(np.zeros_like(acc.data))
        self.pending.append((acc, left, right))
        return acc

    def warpgroup_mma_wait(self, left_over, deps):
        while len(self.pending) > left_over:
            acc, left, right = self.pending.pop(0)
            acc.data += left.data @ right.data
        return deps if len(deps) > 1 else deps[0]


def rebuilt(modules, **instead):
    """The modules' functions of the device as plain Python, with `instead` for what they name."""
    names = {}
    for module in modules:
        for name, value in vars(module).items():
            jitted = type(value).__name__.endswith(("JITFunction", "InterpretedFunction"))
            function = value.fn if jitted else None
            names[name] = value if function is None else FunctionType(function.__code__, names, name)
    names.update(instead)
    return names


def launching(device):
    """What `warmup.launch` does, in float64, on a machine and with the kernel that `device()` gives; what no program
    writes stays NaN.
    """

    def numbers(tensor):
        whole = not tensor.is_floating_point()
        return tensor.numpy().astype(np.int64) if whole else tensor.double().numpy()

    def value(given):
        if hasattr(given, "block_shape"):  # a descriptor of a tensor
            data = numbers(given.base)
            return Descriptor(data & 0xFFFFFFFF if data.dtype == int else data, given.block_shape, given.base.itemsize)
        if isinstance(given, tuple):
            return type(given)(*map(value, given))
        return Pointer(numbers(given).reshape(-1)) if isinstance(given, torch.Tensor) else given

    def launch(jitted, grid, *args, **flags):
        machine, kernel = device()
        machine.programs = grid[0]
        values = [value(given) for given in args]
        y = jitted.arg_names.index("y_ptr")
        values[y].memory[:] = np.nan
        for program in np.ndindex(*grid):
            machine.program = program if len(grid) > 1 else program[0]
            kernel(*values, **{name: flag for name, flag in flags.items() if name != "maxnreg"})
        args[y].copy_(torch.from_numpy(values[y].memory).view_as(args[y]))

    return launch
