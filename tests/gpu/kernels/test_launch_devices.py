"""What is called with tensors of the second card while the first is the current one, as stock code of a model over two
cards does: it waits for what makes its inputs, which are late here.
"""

import pytest
import torch
from accel_kernels import attention, experts
from accel_kernels.attention.backends import AttentionChooser
from accel_kernels.gemm.linear import LinearChooser
from accel_kernels.moe.chooser import ExpertsChooser
from accel_kernels.norm.rms_norm import rms_norm

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

LATE = 100_000_000  # cycles: about 50 ms


def small(op):
    """Its first case, on the second card."""
    args, kwargs = next(iter(op.cases)).make(torch.device("cuda", 1), torch.float32)
    return op, args, kwargs


def linear():
    x, weight = (torch.randn(64, 64, device="cuda:1") for _ in range(2))
    return LinearChooser(), (x, weight), {}


CALLS = {
    "op": lambda: small(rms_norm),
    "attention": lambda: small(attention),
    "experts": lambda: small(experts),
    "experts chosen": lambda: (ExpertsChooser(), *small(experts)[1:]),
    "attention chosen": lambda: (AttentionChooser("triton"), *small(attention)[1:]),
    "product chosen": linear,
}


@pytest.mark.parametrize("name", CALLS)
def test_it_waits_for_its_inputs(name):
    call, args, kwargs = CALLS[name]()
    torch.cuda.set_device(0)
    wanted = call(*args, **kwargs)  # kernels are compiled now
    torch.cuda.synchronize(1)
    x, *rest = args
    late = torch.zeros_like(x)
    with torch.cuda.device(1):
        torch.cuda._sleep(LATE)
    late.copy_(x)
    got = call(late, *rest, **kwargs)
    torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
