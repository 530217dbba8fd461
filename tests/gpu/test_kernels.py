"""Compiled kernels over every case, outputs poisoned, against float64 and torch's own error in the same dtype."""

import pytest
import torch
from accel_kernels import OPS
from accel_kernels.attention_backends import BACKENDS, AttentionChooser

CASES = [pytest.param(op, case, id=f"{op.name}-{case.name}") for op in OPS for case in op.cases]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("op, case", CASES)
def test_kernel_is_as_good_as_torch(op, case, dtype, as_good_as_torch):
    args, kwargs = case.make(torch.device("cuda"), dtype)
    if op.supports(*args, **kwargs) is not None:
        assert op.name in ("attention", "linear_geglu") and dtype == torch.float32, op.supports(*args, **kwargs)
        pytest.skip(op.supports(*args, **kwargs))
    if sum(t.numel() for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)) > 3e8:
        pytest.skip("its float64 reference takes too much memory")
    as_good_as_torch(op, args, kwargs, dtype)


@pytest.mark.parametrize("name", [n for n in BACKENDS if n != "xformers"])
def test_every_backend_computes_attention_on_packed_views(name):
    qkv = torch.randn(2, 100, 3, 4, 40, device="cuda", dtype=torch.float16)
    q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    got = AttentionChooser(name)(q, k, v)
    assert float((got.double() - exact).abs().max()) < 4e-3 * float(exact.abs().max())


def test_choices_are_measured_once_and_kept_on_disk(tmp_path):
    q, k, v = (torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    path = tmp_path / "choices.json"
    chooser = AttentionChooser("auto", path)
    choice = chooser.choose(q, k, v)
    assert choice in BACKENDS and path.exists()
    again = AttentionChooser("auto", path)
    again._measure = None  # must not be needed
    assert again.choose(q, k, v) == choice
