"""What a kernel may be off: twice torch's own error."""

import torch

# Triton's interpreter truncates to bfloat16 where the GPU rounds: one more unit in the last place.
TRUNCATION = {torch.bfloat16: 2**-8}
# fp32 sums in another order than torch's; relative to the largest output.
FLOOR = {torch.float32: 4e-6, torch.float16: 0.0, torch.bfloat16: 0.0}


def assert_as_good_as_torch(op, args, kwargs, dtype):
    """The kernel's largest error against float64 is at most twice the reference's own in this dtype."""

    def double(value):
        if isinstance(value, tuple):
            return type(value)(*map(double, value)) if hasattr(value, "_fields") else tuple(map(double, value))
        if isinstance(value, torch.dtype):  # of the result
            return torch.float64
        wide = isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize > 1  # others are codes
        return value.double() if wide else value

    def many(output):
        return output if isinstance(output, tuple) else (output,)

    exact = many(op.reference(*map(double, args), **{name: double(value) for name, value in kwargs.items()}))
    torchs = many(op.reference(*args, **kwargs))
    ours = many(op.triton(*args, **kwargs))
    slack = FLOOR[dtype] + (0.0 if args[0].is_cuda else TRUNCATION.get(dtype, 0.0))
    for mine, theirs, truth in zip(ours, torchs, exact, strict=True):
        if truth is None:  # what the kernel makes besides; has a test of its own
            continue
        assert mine.dtype == theirs.dtype and mine.shape == truth.shape
        assert torch.isfinite(mine).all()
        peak = truth.abs().max().clamp_min(1e-3)
        error, allowed = (float((t.double() - truth).abs().max() / peak) for t in (mine, theirs))
        assert error <= 2 * allowed + slack, f"error {error:.2e}, torch's own {allowed:.2e}"
