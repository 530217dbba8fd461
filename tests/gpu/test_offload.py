"""Models that hooks move to the GPU and back: graphs replay over weights that have been away, and memory is given back.

What users do before and after is in `test_live_changes.py`.
"""

import copy
import os

import pytest
import torch

import accel
from accel.cuda_graphs.runner import PATIENCE
from accel.offload.placed_model import PlacedModel

STEPS = 6


@pytest.fixture
def pipe(sdxl_pipe):
    return sdxl_pipe.to("cuda", torch.bfloat16)


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="reads the GPU's free memory, which others take")
def test_weights_come_to_the_same_addresses_and_their_memory_goes(tiny):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(16)))
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    placed = PlacedModel(model, torch.device("cuda", 0), lambda model, device: None)
    places, x = set(), torch.randn(3, 4096)
    twin = copy.deepcopy(model).cuda()
    stock = twin(x.cuda())  # with the workspace of cuBLAS, which stays
    del twin
    torch.cuda.empty_cache()
    for visit in range(3):
        free = torch.cuda.mem_get_info()[0]
        placed.to("cuda:0")
        assert placed.reason is None, placed.reason
        assert placed.packed.host.pinned is (visit > 0)
        places.add(model[0].weight.data_ptr())
        assert torch.equal(model(x.cuda()), stock)
        assert free - torch.cuda.mem_get_info()[0] > 2**30
        placed.to("cpu")
        torch.cuda.empty_cache()
        assert not visit or free - torch.cuda.mem_get_info()[0] < 2**22  # the first one loads kernels
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    assert len(places) == 1
    placed.to("cuda:0")
    model[3].weight.data[0] += 1
    wanted["3.weight"][0] += 1
    placed.to("cpu")
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("before", [False, True])
def test_a_pipeline_replays_its_graphs_call_after_call(pipe, live, before):
    twin = copy.deepcopy(pipe)
    if before:
        pipe.enable_model_cpu_offload()
    accel.optimize(pipe, graphs=True)
    if not before:
        pipe.enable_model_cpu_offload()
    wanted = live.draw(twin, steps=STEPS)
    for _ in range(3):
        assert live.rms(live.draw(pipe, steps=STEPS), wanted) < 2e-2
        assert {p.device.type for p in pipe.unet.parameters()} == {"cpu"}
    runner = vars(pipe.unet)["_old_forward"].runner
    replays = runner.replays
    live.draw(pipe, steps=STEPS)
    assert runner.replays == replays + STEPS, accel.report(pipe).graphs
    accel.restore(pipe)
    assert live.rms(live.draw(pipe, steps=STEPS), wanted) < 2e-2
    pipe.remove_all_hooks()
    pipe.to("cuda")
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in pipe.unet.parameters())


def test_layers_stored_in_8_bits_are_read_in_graphs(tiny):
    model = tiny.unet(sample_size=16).cuda().half()
    twin = copy.deepcopy(model)
    inputs = {name: one.cuda().half() for name, one in tiny.inputs(model, height=16, width=16).items()}
    accel.optimize(model, graphs=True)
    for unet in (model, twin):
        unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float16)
    places = [p.data_ptr() for p in model.parameters()]
    with torch.no_grad():
        wanted = twin(**inputs).sample
        for _ in range(PATIENCE + 3):
            got = model(**inputs).sample
            assert float((got - wanted).abs().max()) < 2e-2 * float(wanted.abs().max())
    assert any(row["status"] == "graph" for row in accel.report(model).graphs), accel.report(model).graphs
    assert [p.data_ptr() for p in model.parameters()] == places
    stored = [[p.view(torch.uint8) for p in unet.parameters() if p.itemsize == 1] for unet in (model, twin)]
    assert stored[0] and all(map(torch.equal, *stored))
