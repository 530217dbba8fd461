"""A gate in a pass of its own, as after a prompt that torch's attention takes."""

import pytest
import torch

pytest.importorskip("triton")
from accel_kernels.attention.paged.gate_triton import apply_gate


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter")
@pytest.mark.parametrize(("rows", "new", "heads", "dim"), [(2, 7, 3, 20), (1, 9, 4, 256), (3, 1, 2, 16)])
def test_a_gate_beside_queries_is_read_where_it_lies(rows, new, heads, dim):
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(rows, new, heads * 2 * dim + 24, generator=generator)
    gate = both[..., 24:].unflatten(-1, (heads, 2, dim))[..., 1, :]
    out = torch.randn(rows, new, heads * dim, generator=generator)
    wanted = out * gate.sigmoid().flatten(2)
    assert apply_gate(out, gate) is out
    torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-6)
