"""Row programs as diffusion transformers of today need them: at real sizes, and small ones for tests."""

import torch

from accel_kernels.op import Random, random_cases
from accel_kernels.rowwise.program import FULL, HALF, RowOp, RowProgram


class Writer:
    """Collects operations; each call of `op` gives the number of its register."""

    def __init__(self, rows: int, width: int, *inputs: str):
        self.rows, self.width, self.inputs = rows, width, inputs
        self.ops: list[RowOp] = []

    def op(self, name: str, *args: int, number: float = 0.0, dtype: torch.dtype = torch.float32) -> int:
        self.ops.append(RowOp(name, args, number, dtype))
        return len(self.inputs) + len(self.ops) - 1

    def program(self, *results: int, dtypes: tuple[torch.dtype, ...]) -> RowProgram:
        return RowProgram(self.rows, self.width, self.inputs, tuple(self.ops), results, dtypes)


def _modulated(w: Writer, x: int, scale: int, shift: int, dtype: torch.dtype) -> int:
    """x * (1 + scale) + shift, rounded at each step."""
    one = w.op("add_number", scale, number=1.0, dtype=dtype)
    return w.op("add", w.op("mul", x, one, dtype=dtype), shift, dtype=dtype)


def adaptive_norm(width: int, dtype: torch.dtype) -> RowProgram:
    """layer_norm(x) * (1 + scale) + shift of x, scale, shift (B, S, C)."""
    w = Writer(2, width, FULL, FULL, FULL)
    y = _modulated(w, w.op("layer_norm", 0, number=1e-6, dtype=dtype), 1, 2, dtype)
    return w.program(y, dtypes=(dtype,))


def gated_residual(width: int, dtype: torch.dtype) -> RowProgram:
    """h = x + gate * y and its adaptive norm, of x, y, gate, scale, shift; gives both."""
    w = Writer(2, width, *(FULL,) * 5)
    h = w.op("add", 0, w.op("mul", 2, 1, dtype=dtype), dtype=dtype)
    y = _modulated(w, w.op("layer_norm", h, number=1e-6, dtype=dtype), 3, 4, dtype)
    return w.program(h, y, dtypes=(dtype, dtype))


def tanh_gate(width: int, dtype: torch.dtype) -> RowProgram:
    """x + tanh(gate) * rms_norm(y) * weight, of x, y, weight, gate."""
    w = Writer(2, width, *(FULL,) * 4)
    normed = w.op("mul", w.op("rms_norm", 1, number=1e-5, dtype=dtype), 2, dtype=dtype)
    gated = w.op("mul", w.op("tanh", 3, dtype=dtype), normed, dtype=dtype)
    return w.program(w.op("add", 0, gated, dtype=dtype), dtypes=(dtype,))


def fp32_modulation(width: int, dtype: torch.dtype) -> RowProgram:
    """h = x + y * gate and its adaptive norm, in fp32 but for what is stored, of x, y, gate, scale, shift."""
    w = Writer(2, width, *(FULL,) * 5)
    h = w.op("round", w.op("add", 0, w.op("mul", 1, 2)), dtype=dtype)
    y = _modulated(w, w.op("layer_norm", h, number=1e-6), 3, 4, torch.float32)
    return w.program(h, w.op("round", y, dtype=dtype), dtypes=(dtype, dtype))


def normed_rotary(width: int, dtype: torch.dtype, take: str = "even") -> RowProgram:
    """rms_norm(q) * weight, rotated by fp32 cos and sin in pairs or halves of lanes, of q, weight, cos, sin."""
    other, join = {"even": ("odd", "interleave"), "first": ("second", "concatenate")}[take]
    w = Writer(3, width, *(FULL,) * 4)
    q = w.op("mul", w.op("rms_norm", 0, number=1e-6, dtype=dtype), 1, dtype=dtype)
    turned = w.op(join, w.op("neg", w.op(other, q, dtype=dtype), dtype=dtype), w.op(take, q, dtype=dtype), dtype=dtype)
    y = w.op("add", w.op("mul", q, 2), w.op("mul", turned, 3), dtype=dtype)
    return w.program(y, dtypes=(dtype,))


def rotary_across(width: int, dtype: torch.dtype) -> RowProgram:
    """rms_norm(q) * weight over all heads, its pairs rotated by a head's cos and sin; of q, weight, cos, sin."""
    w = Writer(2, width, *(FULL,) * 4)
    q = w.op("mul", w.op("rms_norm", 0, number=1e-6), 1, dtype=dtype)
    real, imaginary = w.op("even", q, dtype=dtype), w.op("odd", q, dtype=dtype)
    cos, sin = w.op("even", 2), w.op("odd", 3)
    left = w.op("sub", w.op("mul", real, cos), w.op("mul", imaginary, sin), dtype=dtype)
    right = w.op("add", w.op("mul", real, sin), w.op("mul", imaginary, cos), dtype=dtype)
    return w.program(w.op("interleave", left, right, dtype=dtype), dtypes=(dtype,))


def gated_halves(width: int, dtype: torch.dtype, activation: str = "silu", views: bool = True) -> RowProgram:
    """act(gate) * up, of two inputs, or of the halves of one: up first, as GEGLU has it."""
    w = Writer(2, width, FULL, FULL) if views else Writer(2, width, FULL)
    gate, up = (0, 1) if views else (w.op("second", 0, dtype=dtype), w.op("first", 0, dtype=dtype))
    y = w.op("mul", w.op(activation, gate, dtype=dtype), up, dtype=dtype)
    return w.program(y, dtypes=(dtype,))


def half_rotary(width: int, dtype: torch.dtype) -> RowProgram:
    """Each half rotated by cos and sin of half the lanes: x1 cos - x2 sin, x2 cos + x1 sin."""
    w = Writer(3, width, FULL, HALF, HALF)
    one, two = w.op("first", 0, dtype=dtype), w.op("second", 0, dtype=dtype)
    left = w.op("sub", w.op("mul", one, 1), w.op("mul", two, 2), dtype=dtype)
    right = w.op("add", w.op("mul", two, 1), w.op("mul", one, 2), dtype=dtype)
    return w.program(w.op("concatenate", left, right, dtype=dtype), dtypes=(dtype,))


def quantized_norm(width: int, dtype: torch.dtype, kind: str = "int8") -> RowProgram:
    """The adaptive norm of x, scale, shift; its numbers in 8 bits ("int8", "fp8"), scales and peaks of rows."""
    w = Writer(2, width, *(FULL,) * 3)
    y = _modulated(w, w.op("layer_norm", 0, number=1e-6, dtype=dtype), 1, 2, dtype)
    peak = w.op("peak", y)
    numbers, scale = w.op(f"numbers_{kind}", y, peak), w.op(f"scale_{kind}", peak)
    stored = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[kind]
    return w.program(y, numbers, scale, peak, dtypes=(dtype, stored, torch.float32, torch.float32))


@random_cases
def _case(random, shape, arguments):
    """arguments: (random, dtype, *shape) to the program, its inputs and its outputs; shape: of rows, then lanes."""
    program, inputs, outputs = arguments(random, random.dtype, *shape)
    return tuple(inputs), {"program": program, "shape": shape[:-1], "outputs": outputs}


def _adaptive(random: Random, dtype, b, s, c):
    shift, scale, *_ = random(b, 1, 6 * c).chunk(6, dim=-1)
    return adaptive_norm(c, dtype), (random(b, s, c), scale, shift), None


def _residual(random: Random, dtype, b, s, c):
    shift, scale, gate, *_ = random(b, 1, 6 * c).chunk(6, dim=-1)
    return gated_residual(c, dtype), (random(b, s, c), random(b, s, c), gate, scale, shift), None


def _tanh(random: Random, dtype, b, s, c):
    return tanh_gate(c, dtype), (random(b, s, c), random(b, s, c), random(c), random(b, 1, c)), None


def _tokens(random: Random, dtype, b, s, c):
    """A table of fp32 for each token."""
    table = random(b, s, 6, c, dtype=torch.float32)
    return fp32_modulation(c, dtype), (random(b, s, c), random(b, s, c), *(table[:, :, n] for n in (2, 1, 0))), None


def _rotary(take: str):
    def arguments(random: Random, dtype, b, s, h, d):
        """q out of a stacked product, into a part of a buffer that holds text before it."""
        q = random(b, s, 3 * h * d)[..., h * d : 2 * h * d].unflatten(-1, (h, d))
        cos, sin = (random(s, 1, d, dtype=torch.float32) for _ in range(2))
        return normed_rotary(d, dtype, take), (q, random(d), cos, sin), (random(b, s + 5, h, d)[:, 5:],)

    return arguments


def _across(head: int):
    def arguments(random: Random, dtype, b, s, c):
        cos, sin = (random(s, head, dtype=torch.float32) for _ in range(2))
        return rotary_across(c, dtype), (random(b, s, c), random(c), cos, sin), None

    return arguments


def _half_rotary(random: Random, dtype, b, h, s, d):
    """Heads before tokens, as some models have them."""
    q = random(b, s, h, d).transpose(1, 2)
    cos, sin = (random(s, d // 2, dtype=torch.float32) for _ in range(2))
    return half_rotary(d, dtype), (q, cos, sin), None


def _gate(activation: str, views: bool):
    def arguments(random: Random, dtype, b, s, c):
        both = random(b, s, 2 * c if views else c)
        inputs = both.chunk(2, dim=-1) if views else (both,)
        return gated_halves(c, dtype, activation, views), inputs, None

    return arguments


CASES = (
    _case("tiny", (2, 5, 64), _adaptive, small=True),
    _case("odd", (2, 3, 77), _adaptive, small=True),
    _case("one", (1, 1, 2), _residual, small=True),
    _case("residual", (2, 5, 72), _residual, small=True),
    _case("tanh", (1, 6, 40), _tanh, small=True),
    _case("tokens", (2, 3, 130), _tokens, small=True),
    _case("rotary-pairs", (2, 3, 5, 40), _rotary("even"), small=True),
    _case("rotary-halves", (1, 4, 3, 72), _rotary("first"), small=True),
    _case("half-tables", (2, 4, 3, 16), _half_rotary, small=True),
    _case("across-heads", (2, 3, 120), _across(24), small=True),
    _case("swiglu", (2, 3, 130), _gate("silu", True), small=True),
    _case("geglu", (1, 5, 144), _gate("gelu", False), small=True),
    _case("flux-adaptive", (1, 4608, 3072), _adaptive),
    _case("sd3-adaptive-b2", (2, 4096, 1536), _adaptive),
    _case("flux-residual", (1, 4096, 3072), _residual),
    _case("z-image-tanh", (1, 4128, 3840), _tanh),
    _case("wan-tokens", (1, 6240, 3072), _tokens),
    _case("flux-rotary", (1, 4096, 24, 128), _rotary("even")),
    _case("flux-rotary-b2", (2, 1024, 24, 128), _rotary("even")),
    _case("wan-across-heads", (1, 32760, 1536), _across(128)),
    _case("halves-rotary", (1, 4128, 30, 128), _rotary("first")),
    _case("half-tables-rotary", (1, 24, 4096, 128), _half_rotary),
    _case("flux2-swiglu", (1, 4608, 9216), _gate("silu", True)),
    _case("geglu-halves", (2, 4096, 10240), _gate("gelu", False)),
    _case("gelu-tanh", (1, 4608, 12288), _gate("gelu_tanh", True)),
)
