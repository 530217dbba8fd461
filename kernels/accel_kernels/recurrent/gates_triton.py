"""What kernels of linear attention share: the taps of a convolution, decay and strength of a token, keys by length."""

import triton
import triton.language as tl

from accel_kernels.elementwise.activations_triton import activate


@triton.jit
def softplus(x):
    """log(1 + exp(x)), exact for small ones too; x itself above 20, as torch's."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    small = tl.where(u == 1.0, e, tl.log(u) * (e / (u - 1.0)))  # 1 + e rounds e, and u - 1 is what is left of it
    return tl.where(x > 20.0, x, small)


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
def convolved(
    new, window_ptr, weight_ptr, bias_ptr, c_idx, mask, position, channels, kept, TAPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """The convolution of one token, in fp32. new: its input; kept: of which channels it is put into the window.

    Its place in the window is that of an input which nobody needs any more: programs that share channels never race.
    """
    total = tl.zeros(c_idx.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        if tap == TAPS - 1:
            x = new
        else:
            at = position + tap - (TAPS - 1) + 0 * c_idx
            x = tl.load(window_ptr + at % TAPS * channels + c_idx, mask=mask & (at >= 0), other=0.0)
        weight = tl.load(weight_ptr + c_idx * TAPS + tap, mask=mask, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + c_idx, mask=mask, other=0.0).to(tl.float32)
    tl.store(window_ptr + position % TAPS * channels + c_idx, new, mask=kept)
    return after_taps(total, weight_ptr.dtype.element_ty, ACTIVATION).to(new.dtype).to(tl.float32)
