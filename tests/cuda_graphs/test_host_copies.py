"""Copies from the CPU inside of a forward: noted in one call, taken from the device in another, and compared."""

import pytest
import torch

from accel.cuda_graphs.entry import switches
from accel.cuda_graphs.host_copies import HostCopies

META = torch.device("meta")  # stands for a GPU: a device that is not the CPU


def forward(frequencies, scale=2.0):
    table = torch.outer(torch.arange(3.0), frequencies)
    buffer = torch.empty(2, dtype=torch.float64, device=META)
    buffer.copy_(frequencies)
    made = torch.tensor([1.0, scale], device=META)
    return (
        table.to(META, torch.bfloat16),
        table.cos().to(META),
        buffer,
        made,
        table.double(),
        torch.as_tensor(made, device=META),
    )


def test_copies_are_noted_in_order():
    copies, frequencies = HostCopies(), torch.tensor([0.5, 0.25])
    with copies.noted():
        moved, cosine, buffer, made, wide, same = forward(frequencies)
    table = torch.outer(torch.arange(3.0), frequencies)
    wanted = [frequencies, torch.tensor([1.0, 2.0]), table, table.cos()]
    assert len(copies.found) == 4 and all(
        torch.equal(one.host, right) for one, right in zip(copies.found, wanted, strict=True)
    )
    assert all(one.device.device == META for one in copies.found)
    assert moved.dtype == torch.bfloat16 and cosine.dtype == torch.float32 and buffer.dtype == torch.float64
    assert (made.device, same, wide.device.type) == (META, made, "cpu")
    frequencies.zero_()
    assert copies.found[0].host.any()  # as it was


def test_equal_copies_are_those_of_the_device():
    copies, frequencies = HostCopies(), torch.tensor([0.5, float("nan")])
    with copies.noted():
        forward(frequencies)
    known = [one.device for one in copies.found]
    with copies.replayed():
        moved, cosine, *_ = forward(frequencies.clone())
    assert moved.shape == (3, 2) and moved.dtype == torch.bfloat16 and cosine.device == META
    assert all(moved is not one for one in known) and len(copies.found) == 4


@pytest.mark.parametrize(
    "other",
    [
        lambda: forward(torch.tensor([0.5, 0.26])),
        lambda: forward(torch.tensor([0.5, 0.25]), 3.0),
        lambda: forward(torch.tensor([0.5, 0.25, 0.1])),
        lambda: forward(torch.tensor([0.5, 0.25]).double()),
        lambda: (forward(torch.tensor([0.5, 0.25])), torch.ones(2).to(META)),
        lambda: None,
    ],
    ids=["numbers", "a number", "shape", "dtype", "more", "fewer"],
)
def test_others_are_refused(other):
    copies = HostCopies()
    with copies.noted():
        forward(torch.tensor([0.5, 0.25]))
    with pytest.raises(RuntimeError, match="numbers of the CPU"), copies.replayed():
        other()


def test_what_stays_on_its_device_is_left_alone():
    copies = HostCopies()
    with copies.noted():
        torch.ones(2).to(torch.float64).copy_(torch.zeros(2))
        torch.tensor([1.0], device="cpu").clone()
        torch.empty(3, device=META).to(torch.float64)
    assert copies.found == []


def test_random_numbers_of_the_cpu_are_not_kept():
    copies = HostCopies()
    with copies.noted():
        torch.rand(4).to(META)
    with pytest.raises(RuntimeError, match="another call"), copies.replayed():
        torch.rand(4).to(META)


def test_tensors_of_the_cpu_given_to_makers_are_noted_and_others_are_not():
    copies = HostCopies()
    with copies.noted():
        torch.as_tensor(torch.ones(2), device=META)
        torch.asarray(obj=[1.0, 2.0, 3.0], device="meta")
        torch.asarray(obj=torch.empty(4, device=META), device=META)
        torch.tensor(data=5, device=META)
    assert [one.host.tolist() for one in copies.found] == [[1.0, 1.0], [1.0, 2.0, 3.0], 5]


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_a_graph_is_for_one_precision_of_sums(kind):
    """Products of the same shape take other kernels where the user has asked for full sums since."""
    name = f"allow_{kind}_reduced_precision_reduction"
    before, matmul = switches(), torch.backends.cuda.matmul
    was = getattr(matmul, name)
    try:
        setattr(matmul, name, not was)
        assert switches() != before
    finally:
        setattr(matmul, name, was)
    assert switches() == before
