"""Faults under `memory=`: a clear error or what stock gives, and nothing is left behind."""

import copy
import ctypes
import mmap
import os
import pickle
import sys
import threading
from functools import partial

import psutil
import pytest
import torch
from accel_kernels.device import cuda_driver
from accelerate import cpu_offload, cpu_offload_with_hook, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from diffusers import FluxTransformer2DModel
from diffusers.hooks import apply_group_offloading
from torch.testing._internal.two_tensor import TwoTensor

import accel
from accel.diffusion import tiling
from accel.diffusion.dit.executable import Executable
from accel.errors import Refused
from accel.offload.blocks import nbytes, sizes_of
from accel.offload.budget import Budget
from accel.offload.call_hooks import streamed_model as streamed
from accel.offload.layout import Layout
from accel.offload.memory import HostBuffer
from accel.offload.piece import PlacedWeights
from accel.offload.ring import Ring
from accel.offload.streamed_model import StreamedModel
from accel.planning.memory import check_ram
from support.noted import fails_at
from support.objects.streaming import flux, llama, same, stored, within

HERE = torch.device("cpu")
IN_GROUPS = partial(apply_group_offloading, onload_device=HERE, offload_device=HERE, offload_type="leaf_level")
SPREAD = partial(dispatch_model, device_map={"": "cpu"}, main_device="cpu", force_hooks=True)


@pytest.fixture(autouse=True)
def counted(streaming):
    """Whatever happens: buffers die with the last model."""
    yield
    assert streaming() == 0


def untouched(model, before):
    same(model, before)
    assert not any(one._forward_hooks or one._forward_pre_hooks or "_call_impl" in vars(one) for one in model.modules())
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


def no_room(*given):
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("place", ["hook", "take", "leave", "begin", "_bring", "_learn"])
@torch.no_grad()
def test_an_interrupted_call_ends(place, monkeypatch):
    model, call = flux()
    before, wanted = stored(model), call(accel.optimize(copy.deepcopy(model)))
    accel.optimize(model, memory=within(model, 0.9))
    if place == "hook":
        hook = model.single_transformer_blocks[2].register_forward_pre_hook(lambda *given: exit(1), prepend=True)
    elif place.startswith("_"):
        fails_at(monkeypatch, 1, StreamedModel, place, KeyboardInterrupt)
        streamed(model).streamed = None  # is to be chosen anew
    else:
        fails_at(monkeypatch, 3, Ring, place, KeyboardInterrupt)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        call(model)
    if place == "hook":
        hook.remove()
    same(model, before)
    got = []
    other = threading.Thread(target=lambda: got.append(torch.no_grad()(call)(model)))
    other.start()
    other.join(20)
    assert len(got) == 1 and float((got[0] - wanted).abs().max()) < 1e-5
    accel.restore(model)
    untouched(model, before)


@torch.no_grad()
def test_a_block_that_is_called_by_itself_and_interrupted_leaves_no_lock():
    model, call = llama()
    accel.optimize(model, memory=within(model, 1.0))
    wanted, block, given = call(model), model.model.layers[1], torch.randn(1, 4, 32)
    hook = block.mlp.register_forward_pre_hook(lambda *given: exit(1))
    with pytest.raises(SystemExit):
        block(given, position_embeddings=model.model.rotary_emb(given, torch.arange(4)[None]))
    hook.remove()
    got = []
    other = threading.Thread(target=lambda: got.append(torch.no_grad()(call)(model)))
    other.start()
    other.join(20)
    assert len(got) == 1 and torch.equal(got[0], wanted)


@torch.no_grad()
def test_too_little_for_a_call_is_told(monkeypatch):
    model, call = flux()
    accel.optimize(model, memory=within(model, 0.9))
    hook = model.single_transformer_blocks[2].register_forward_pre_hook(no_room)
    with pytest.raises(torch.OutOfMemoryError, match="memory=0.00 GB: a call of this Flux.*CUDA out of memory."):
        call(model)
    hook.remove()
    call(model)
    monkeypatch.setattr(StreamedModel, "_peak", lambda self: 10**8)
    with pytest.warns(UserWarning, match="needs 0.10 GB beside the 0.00 GB of its weights"):
        call(model, 40)


@torch.no_grad()
def test_no_room_to_compare_a_block_with_stock_leaves_it_stock(monkeypatch):
    model, call = flux()
    wanted = call(copy.deepcopy(model))
    monkeypatch.setattr(Executable, "__call__", no_room)
    accel.optimize(model, memory=within(model, 0.9))
    assert all(torch.equal(call(model), wanted) for _ in range(2))
    assert all("out of memory" in why for _, why, _ in accel.report(model).fallbacks) and accel.report(model).fallbacks


@pytest.mark.parametrize("place", [(5, PlacedWeights, "put"), (1, StreamedModel, "_bring"), (1, PlacedWeights, "go")])
def test_an_interrupted_optimize_leaves_nothing(place, monkeypatch):
    model, _ = flux()
    before = stored(model)
    fails_at(monkeypatch, *place, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        accel.optimize(model, memory=within(model, 0.9))
    untouched(model, before)


@pytest.mark.parametrize("short", ["allocation", "free", "in a call"])
def test_too_little_ram_is_told(short, monkeypatch, tmp_path):
    """Also in a call for which a hook brings the model, which would come as a whole."""
    model, _ = flux()
    before, free = stored(model), psutil.virtual_memory()
    hooked = StreamedModel(model, HERE, lambda *given: None, Budget(nbytes(model))) if short == "in a call" else None
    if short != "free":
        monkeypatch.setattr(HostBuffer, "__init__", lambda self, nbytes: torch.empty(2**60))
    else:
        torch.save(model.state_dict(), tmp_path / "weights")
        model.load_state_dict(torch.load(tmp_path / "weights", mmap=True), assign=True)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: free._replace(available=1000))
    with pytest.raises(Refused, match="cannot be streamed: .*memory|of weights go to the CPU's memory, of which 0.0"):
        accel.optimize(model, memory=within(model, 0.9)) if hooked is None else hooked.enter()
    if hooked is not None:
        hooked.let_go()
    same(model, before)
    assert not any("_call_impl" in vars(one) or "forward" in vars(one) for one in model.modules())


@pytest.mark.parametrize("kind", [type("Own", (torch.nn.Parameter,), {}), TwoTensor])
def test_a_model_of_a_pipeline_that_would_go_beyond_is_refused(kind, sdxl_pipe):
    """Hooks would bring it whole. Quantizers make weights of several tensors, which have no memory of their own."""
    weight = sdxl_pipe.unet.conv_in.weight.detach()
    told = "memory=: the weights of a UNet2DConditionModel cannot be streamed: .* type " + kind.__name__
    sdxl_pipe.unet.conv_in.weight = torch.nn.Parameter(TwoTensor(weight, weight)) if kind is TwoTensor else kind(weight)
    before, kinds = stored(sdxl_pipe.unet), set(vars(sdxl_pipe))
    assert nbytes(sdxl_pipe.unet.conv_in) == (1 + (kind is TwoTensor)) * weight.nbytes + 64
    with pytest.raises(Refused, match=told):
        accel.optimize(sdxl_pipe, memory=int(0.6 * nbytes(sdxl_pipe.unet)))
    untouched(sdxl_pipe.unet, before)
    assert set(vars(sdxl_pipe)) == kinds


def test_an_autoencoder_that_does_not_fit_as_a_whole_is_refused(sdxl_pipe):
    """It comes to the GPU so; by its blocks it would fit. All is as it was optimized before."""
    budget, sites = nbytes(sdxl_pipe.vae) - 1, accel.report(accel.optimize(sdxl_pipe)).sites
    assert sizes_of(sdxl_pipe.vae).least() < budget
    with pytest.raises(Refused, match="a AutoencoderKL needs 0.01 GB"):  # rounded up: what is named is enough
        accel.optimize(sdxl_pipe, memory=budget)
    assert accel.report(sdxl_pipe).sites == sites


def test_a_file_of_any_name_may_be_mapped(tmp_path):
    path = os.path.join(os.fsencode(tmp_path), b"\xff")
    with open(path, "w+b") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 0):
            check_ram([])


@pytest.mark.parametrize(("platform", "name"), [("win32", "nvcuda.dll"), ("linux", "libcuda.so.1")])
def test_the_driver_is_found_on_each_system(platform, name, monkeypatch):
    asked = []
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", asked.append)
    cuda_driver.__wrapped__()
    assert asked == [name]


@pytest.mark.parametrize("before", ["stock", "streams", "in groups"])
@pytest.mark.share(1)
@torch.no_grad()
def test_weights_on_a_disk_are_refused_and_stay_there(before, tmp_path):
    """Of a model that streams, what was before can no longer be: it is stock."""
    model, call = llama()
    wanted, twin = call(model), copy.deepcopy(model)
    if before == "streams":
        accel.optimize(model, memory=10**6)
    for number, one in enumerate((model, twin)):
        if before == "in groups":
            IN_GROUPS(one, offload_to_disk_path=str(tmp_path / str(number)))
            SPREAD(one)
        else:
            disk_offload(one, tmp_path, HERE)
    with pytest.raises(Refused, match="memory=: .* weights are on a disk"):
        accel.optimize(model, memory=10**6)
    for _ in range(2):
        kinds = [[set(vars(one)) for one in held.modules()] for held in (model, twin)]
        assert kinds[0] == kinds[1]
        assert torch.equal(call(model), wanted)
        accel.restore(model)


def test_gradients_are_refused_where_weights_stream():
    model, call = flux()
    twin, before = copy.deepcopy(model), stored(model)
    accel.optimize(model, memory=within(model, 0.9))
    for one in (model.train(), twin.train()):
        loss = call(one).square().mean()
        if one is model:
            with pytest.raises(Refused, match="not kept for gradients"):
                loss.backward()
            accel.restore(model)
            untouched(model, before)
            loss = call(one).square().mean()
        loss.backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-6)
    del loss


@torch.no_grad()
def test_it_is_saved_as_it_is_and_what_changes_shape_in_place_is_seen(tmp_path):
    model, call = flux()
    before = stored(model)
    accel.optimize(model, memory=within(model, 0.9))
    call(model)
    model.save_pretrained(tmp_path)
    same(FluxTransformer2DModel.from_pretrained(tmp_path), before)
    assert (tmp_path / "diffusion_pytorch_model.safetensors").stat().st_size < 1.1 * nbytes(model)
    assert len(pickle.dumps(model.single_transformer_blocks[0].proj_mlp.weight)) < 1.1 * 16 * 1024
    weight = model.transformer_blocks[0].attn.to_q.weight
    weight.data = weight.data.t()
    wanted, twin = weight.clone(), copy.deepcopy(model)
    accel.restore(twin)
    assert float((call(model) - call(twin)).abs().max()) < 1e-5 and torch.equal(weight, wanted)


def test_a_lone_weight_is_saved_without_its_neighbors():
    weight = torch.nn.Parameter(torch.ones(64))
    PlacedWeights("", Layout([weight]), HostBuffer(2**16), 1024)
    assert weight.untyped_storage().nbytes() == weight.nbytes and bool((weight == 1).all())


@torch.no_grad()
@pytest.mark.turns(2)
def test_another_offload_on_top_brings_what_streamed(tmp_path):
    model, call = flux()
    before, wanted = stored(model), call(accel.optimize(copy.deepcopy(model)))
    accel.optimize(model, memory=within(model, 0.3))
    call(model)
    put_on = partial(cpu_offload, execution_device=torch.device("cpu"))
    for change in (put_on, remove_hook_from_submodules, put_on, accel.restore, remove_hook_from_submodules):
        change(model)
        for _ in range(2):
            assert float((call(model) - wanted).abs().max()) < 1e-5
    same(model, before)
    accel.optimize(model, memory=within(model, 0.3))
    call(model)
    disk = {"offload_to_disk_path": str(tmp_path), "offload_type": "block_level", "num_blocks_per_group": 2}
    apply_group_offloading(model, torch.device("cpu"), torch.device("cpu"), **disk)
    for change in (lambda model: None, accel.restore):
        change(model)
        for _ in range(2):
            assert float((call(model) - wanted).abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("stock", "other"),
    [
        (IN_GROUPS, partial(cpu_offload_with_hook, execution_device=HERE)),  # another pipeline's
        (IN_GROUPS, SPREAD), (SPREAD, partial(cpu_offload, execution_device=HERE)),
    ],
)  # fmt: skip
@pytest.mark.share(1)
@torch.no_grad()
def test_stocks_offload_does_not_come_back_beneath_another(stock, other):
    """diffusers and accelerate refuse it there, in the middle of `restore`."""
    model, call = flux()
    stock(model)
    wanted = call(model)
    accel.optimize(model, memory=within(model, 0.9))
    other(model)
    with pytest.warns(UserWarning, match="offload of a FluxTransformer2DModel is not put back: another one"):
        accel.restore(model)
    assert torch.equal(call(model), wanted)


@torch.no_grad()
@pytest.mark.turns(2)
def test_blocks_that_change_places_are_followed():
    model, call = flux()
    twin = copy.deepcopy(model)
    accel.optimize(model, memory=int(1.1 * within(model, 0.7)))
    for size in (9, 16, 40):  # of which each is a reason to choose anew what streams
        for blocks in (model.single_transformer_blocks, twin.single_transformer_blocks):
            blocks[2], blocks[3] = blocks[3], blocks[2]
            del blocks[5 if size == 40 else len(blocks) :]
        for _ in range(2):
            assert float((call(model, size) - call(twin, size)).abs().max()) < 2e-5
    accel.restore(model)
    same(model, stored(twin))


@pytest.mark.parametrize("change", ["shared", "removed"])
@torch.no_grad()
@pytest.mark.turns(2)
def test_hooks_of_a_pipeline_that_others_take_off(sdxl_pipe, live, monkeypatch, change):
    """By another pipeline of the same models too."""
    monkeypatch.setattr(tiling, "PLANES", 0)
    before, wanted = stored(sdxl_pipe.unet), live.draw(copy.deepcopy(sdxl_pipe), 1)
    budget = int(0.6 * nbytes(sdxl_pipe.unet))
    pipes = [accel.optimize(sdxl_pipe, memory=budget, layout="keep")]
    live.draw(sdxl_pipe, 1)
    if change == "removed":
        sdxl_pipe.remove_all_hooks()
    else:
        others = type(sdxl_pipe)(**sdxl_pipe.components)  # with a budget of their own
        pipes.append(accel.optimize(others, memory=int(1.2 * budget), layout="keep"))
        assert streamed(sdxl_pipe.unet) is not None
    for pipe in reversed(pipes):
        assert live.rms(live.draw(pipe, 1), wanted) < 1e-4
    for left, pipe in enumerate(pipes, 1):
        assert "decode" in vars(pipe.vae)  # in tiles, of whoever is still optimized
        accel.restore(pipe)
        assert ("decode" in vars(pipe.vae)) == (left < len(pipes))
    untouched(sdxl_pipe.unet, before)
