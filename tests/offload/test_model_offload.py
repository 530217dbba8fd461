"""Weights that come to one place and go back, with a piece of the host's memory in the place of a GPU's."""

import copy
import weakref

import pytest
import torch
from accelerate import cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module

import accel
from accel.cuda_graphs.fingerprint import Fingerprint
from accel.cuda_graphs.rule import GraphForward, obstacle
from accel.diffusion.pipeline import lay_out_for_gpu
from accel.offload import hooks
from accel.offload.blocks import nbytes
from accel.offload.budget import Budget
from accel.offload.call_hooks import streamed_model
from accel.offload.layout import separate
from accel.offload.memory import HostBuffer
from accel.offload.placed_model import PlacedModel
from support.diffusion.outputs import close, run
from support.objects.emulated_card import THERE, Addresses
from support.objects.streaming import flux


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(PlacedModel, "_reserve", lambda self, nbytes: Addresses(nbytes))
    monkeypatch.setattr(HostBuffer, "pin", lambda self: None)
    monkeypatch.setattr(hooks, "GPUS", ("cpu",))


def stored(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(model, wanted):
    found = model.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def place(model):
    return PlacedModel(model, THERE, lambda model, device: None)


def addresses(model):
    return [tensor.data_ptr() for tensor in model.state_dict(keep_vars=True).values()]


def test_it_comes_to_the_same_addresses_and_goes_back_to_the_same(tiny):
    model = tiny.unet()
    wanted, placed = stored(model), place(model)
    assert placed.to(THERE) is model and placed.reason is None
    there = addresses(model)
    same(model, wanted)
    placed.to("cpu")
    here = addresses(model)
    assert not set(here) & set(there) and placed.mapping is None
    same(model, wanted)
    placed.to(THERE)
    assert addresses(model) == there
    placed.to("cpu")
    assert addresses(model) == here
    separate(model)
    same(model, wanted)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


@pytest.mark.parametrize("change", ["in place", "data", "swapped", "loaded", "replaced", "cast"])
def test_what_changes_there_comes_back(tiny, change):
    model = tiny.unet()
    placed = place(model)
    placed.to(THERE)
    weight = model.conv_in.weight
    with torch.no_grad():
        if change == "in place":
            weight.add_(1)
        elif change == "data":
            weight.data += 1  # as adapters are merged; autograd counts nothing
        elif change == "swapped":
            weight.data[:2] = weight.data[:2].flip(0)
        elif change == "loaded":
            model.load_state_dict({name: one + 1 for name, one in model.state_dict().items()})
        elif change == "replaced":
            model.conv_in = torch.nn.Conv2d(4, 16, 3, padding=1)
        else:
            model.to(torch.float64)
    wanted = stored(model)
    for _ in range(2):
        placed.to("cpu")
        same(model, wanted)
        placed.to(THERE)
        same(model, wanted)
    assert placed.reason is None


def test_weights_stay_ordinary_tensors_under_inference_mode(tiny):
    model = tiny.unet()
    versions, placed = [p._version for p in model.parameters()], place(model)
    with torch.inference_mode():
        for device in (THERE, "cpu", THERE):
            placed.to(device)
    assert [p._version for p in model.parameters()] == versions


def test_what_changes_here_goes_there(tiny):
    model = tiny.unet()
    placed = place(model)
    placed.to(THERE)
    there = addresses(model)
    placed.to("cpu")
    model.conv_in.weight.data += 1
    wanted = stored(model)
    placed.to(THERE)
    same(model, wanted)
    assert addresses(model) == there


def test_a_view_that_somebody_keeps_stays_valid(tiny):
    model = tiny.unet()
    placed = place(model)
    placed.to(THERE)
    kept, there = model.conv_in.weight.detach(), addresses(model)
    wanted = kept.clone()
    placed.to("cpu")
    placed.to(THERE)
    assert torch.equal(kept, wanted) and not set(addresses(model)) & set(there)


def test_what_shares_memory_or_lies_side_by_side_stays_so():
    model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 50) for name in "abc"})
    whole = torch.randn(100, 3)
    model.a.weight.data, model.b.weight.data = whole.split(50)
    model.c.weight = model.a.weight
    model.b.bias.data, model.c.bias.data = model.a.bias.data[:50], whole.flatten()[2:52]
    wanted, placed = stored(model), place(model)
    for device in (THERE, "cpu", THERE):
        placed.to(device)
        same(model, wanted)
        assert model.b.weight.data_ptr() == model.a.weight.data_ptr() + model.a.weight.nbytes
        assert model.b.bias.data_ptr() == model.a.bias.data_ptr() and model.c.weight is model.a.weight
        assert model.c.bias.data_ptr() == model.a.weight[0, 2].data_ptr()


@pytest.mark.parametrize("kind", ["subclass", "gradient", "conjugate", "dtypes"])
def test_what_cannot_lie_in_one_run_of_bytes_moves_as_stock_moves_it(kind):
    model = torch.nn.Linear(4, 4)
    if kind == "subclass":
        model.weight = type("Own", (torch.nn.Parameter,), {})(torch.randn(4, 4))
    elif kind == "gradient":
        model.weight.grad = torch.ones(4, 4)
    elif kind == "conjugate":
        model.register_buffer("other", torch.ones(2, dtype=torch.complex64).conj())
    else:
        model.register_buffer("seen", model.weight.detach().view(torch.int32))
    placed = place(model)
    placed.to(THERE)
    assert placed.reason is not None and placed.mapping is None


class Pipe:
    """What of a pipeline its hooks are."""

    def __init__(self, model):
        self.model = model

    def remove(self):
        remove_hook_from_module(self.model)
        self._all_hooks = []

    def enable_model_cpu_offload(self):
        self.remove()
        self._all_hooks = [cpu_offload_with_hook(self.model, THERE)[1]]


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.share(1)
@pytest.mark.turns(2)
def test_hooks_of_accelerate_move_by_us_and_leave_graphs_possible(tiny, removed):
    model = tiny.unet()
    inputs = tiny.inputs(model)
    twin = copy.deepcopy(model)
    accel.optimize(model, cpu="fuse")
    forward = vars(model)["forward"]
    prints = []
    pipe = Pipe(model)
    switch = hooks.OffloadSwitch(pipe, lambda model, device: None)
    switch()
    for _ in range(3):
        close(run(model, inputs), run(twin, inputs))
        placed = switch.placed()[0]
        assert placed.mapping is not None and placed.mapping() is not None
        assert vars(model)["_old_forward"] is forward
        assert hooks.comes_to_one_place(model) and obstacle(model) is None
        prints.append(Fingerprint(model))
        assert all(one.holds() and one.reachable() for one in prints)
        switch()  # as a pipeline does at the end of each call
        assert "to" not in vars(model) and not prints[0].reachable()
    copied = copy.deepcopy(pipe), copy.deepcopy(model)
    close(run(copied[1], inputs), run(twin, inputs))
    gone = weakref.ref(placed)
    del placed
    pipe.remove() if removed else switch.let_go()
    assert gone() is None
    assert removed or "hooks on" in obstacle(model)
    switch.let_go()
    same(model, twin.state_dict())
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


@pytest.mark.parametrize("change", ["dropped", "copied", "replaced"])
@torch.no_grad()
def test_a_model_that_no_pipeline_has_any_more_is_restored(change, streaming):
    model, call = flux()
    wanted, kinds = call(model), [set(vars(one)) for one in model.modules()]
    pipe = Pipe(model)
    switch = hooks.OffloadSwitch(pipe, lambda *given: None, Budget(int(1.5 * nbytes(model))), added=True)
    switch()
    assert torch.equal(call(model), wanted) and streamed_model(model) is not None
    if change == "dropped":
        del pipe, switch
    elif change == "replaced":
        pipe.model = torch.nn.Linear(1, 1)
        switch()
        switch.let_go()
    else:
        model = copy.deepcopy(model)
    accel.restore(model)
    assert [set(vars(one)) for one in model.modules()] == kinds and torch.equal(call(model), wanted)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


def test_half_of_an_autoencoder_keeps_no_graph_while_it_is_offloaded(tiny):
    model = tiny.vae()
    accel.optimize(model, cpu="fuse")
    lay_out_for_gpu(model, THERE)
    forwards = vars(model.encoder)["forward"], vars(model.decoder)["forward"].inner
    assert all(isinstance(forward, GraphForward) and forward.holder is model for forward in forwards)


def test_what_moves_one_by_one_gets_no_graph_and_says_why(tiny):
    model = tiny.unet()
    model.register_buffer("none", torch.empty(0))  # comes along
    model.register_buffer("other", torch.ones(2, dtype=torch.complex64).conj())
    pipe = Pipe(model)
    switch = hooks.OffloadSwitch(pipe, lambda model, device: None)
    switch()
    run(model, tiny.inputs(model))
    assert "one by one (offload): a weight with a gradient, or a conjugate" in obstacle(model)


@torch.no_grad()
def test_nothing_of_a_group_that_has_not_come_is_read(tiny, tmp_path):
    """Weights on a disk leave memory in their place, of any numbers; those on their way to a GPU do so too."""
    model, device = tiny.unet(), torch.device("cpu")
    inputs = tiny.inputs(model)
    wanted = run(copy.deepcopy(model), inputs)
    accel.optimize(model)
    run(model, inputs)
    groups = {"offload_type": "block_level", "num_blocks_per_group": 1, "offload_to_disk_path": str(tmp_path)}
    model.enable_group_offload(device, device, **groups)
    for _ in range(2):
        close(run(model, inputs), wanted)
