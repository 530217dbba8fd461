"""What kernels of linear attention share: the taps of a convolution, decay and strength of a token, keys by length."""

import triton
import triton.language as tl

from accel_kernels.elementwise.activations_triton import activate, softplus


@triton.jit
def decay_gate(a, a_log, bias, lower_bound, low, high, ROUND: tl.constexpr, DELTA: tl.constexpr):
    """g and dt of `recurrence.gates`. a has its own dtype; a_log and bias are fp32."""
    kind: tl.constexpr = a.dtype
    if ROUND and not DELTA:
        x = (a.to(tl.float32) + bias.to(kind).to(tl.float32)).to(kind).to(tl.float32)
    else:
        x = a.to(tl.float32) + bias
    rate = tl.exp(a_log)
    dt = softplus(x)
    if ROUND and not DELTA:
        dt = dt.to(kind).to(tl.float32)
    dt = tl.minimum(tl.maximum(dt, low), high)
    if lower_bound is None:
        g = -rate * dt
    else:
        g = lower_bound / (1.0 + tl.exp(-rate * x))
    if ROUND and DELTA:
        g = g.to(kind).to(tl.float32)
    return g, dt


@triton.jit
def decay_sums(g, PAIR: tl.constexpr):
    """Of a chunk's decays g: sums up to each token, and of all; of those behind each; after token j up to token i.

    Without PAIR they are taken in float64, and a second float32 keeps what the first one loses: differences of sums
    around 60 would be 4e-6 off, and by as much what decays by them.
    """
    if PAIR:
        total, last = tl.cumsum(g, axis=0), tl.sum(g, axis=0)
        until, between = last - total, total[:, None] - total[None, :]
    else:
        sums, whole = tl.cumsum(g.to(tl.float64), axis=0), tl.sum(g.to(tl.float64), axis=0)
        total, last, until = sums.to(tl.float32), whole.to(tl.float32), (whole - sums).to(tl.float32)
        rest = (sums - total.to(tl.float64)).to(tl.float32)
        between = total[:, None] - total[None, :] + (rest[:, None] - rest[None, :])
    return total, last, until, between


@triton.jit
def beta_gate(b, scale):
    """sigmoid(b) in the dtype of b, times a power of two."""
    return (1.0 / (1.0 + tl.exp(-b.to(tl.float32)))).to(b.dtype).to(tl.float32) * scale


@triton.jit
def after_taps(total, kind: tl.constexpr, ACTIVATION: tl.constexpr):
    """A convolution's sum through its activation, rounded to `kind` before and after."""
    total = total.to(kind).to(tl.float32)
    if ACTIVATION is not None:
        total = activate(total, ACTIVATION).to(kind).to(tl.float32)
    return total


@triton.jit
def past_taps(
    x_ptr, idx, mask, window_ptr, written_ptr, weight_ptr, weight_strides, bias_ptr, first_channel, position, first,
    channels, TAPS: tl.constexpr, BLOCK_TAPS: tl.constexpr,
):  # fmt: skip
    """What a convolution of one token reads but for the token: inputs before it and weights (BLOCK_TAPS, channels),
    bias; and where all of them are to be kept, and which are.

    x_ptr: of channels `first_channel` and up. Without a window the token stands alone. Taps are rows of one tile: as
    vectors that are loaded one by one they would be loaded by all threads. The token's place in the window is that of
    an input which nobody needs any more, so programs that share channels never race.
    """
    tap = tl.arange(0, BLOCK_TAPS)[:, None]
    row, rows = idx[None, :] + 0 * tap, mask[None, :] & (tap < TAPS)
    inputs = tl.zeros(row.shape, tl.float32)
    weights, bias, places, kept = inputs, tl.zeros(idx.shape, tl.float32), x_ptr + row, rows
    if window_ptr is not None:
        window_ptr += first_channel
        at = position + tap - (TAPS - 1)
        stored = rows & (tap < TAPS - 1) & (at >= first)
        inputs = tl.load(window_ptr + at % TAPS * channels + row, mask=stored, other=0.0).to(tl.float32)
        weight_ptr += (first_channel + row) * weight_strides[0] + tap * weight_strides[1]
        weights = tl.load(weight_ptr, mask=rows, other=0.0).to(tl.float32)
        kept = rows & (tap == TAPS - 1) | stored
        places = written_ptr + first_channel + at % TAPS * channels + row
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + first_channel + idx, mask=mask, other=0.0).to(tl.float32)
    return inputs, weights, bias, places, kept


@triton.jit
def convolved(inputs, weights, bias, new, weight_ptr, kind: tl.constexpr, ACTIVATION: tl.constexpr, TAPS: tl.constexpr):
    """The convolution of a token, `new`, behind what `past_taps` has read, in fp32 and rounded as transformers does.

    Second: all inputs, that of the token too.
    """
    if weight_ptr is None:
        y = new.to(tl.float32)
    else:
        newest = tl.arange(0, inputs.shape[0])[:, None] == TAPS - 1
        inputs = tl.where(newest, new.to(tl.float32)[None, :], inputs)
        y = tl.sum(inputs * weights, axis=0) + bias
        y = after_taps(y, weight_ptr.dtype.element_ty, ACTIVATION).to(kind).to(tl.float32)
    return y, inputs
