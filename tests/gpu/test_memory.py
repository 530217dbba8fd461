"""Weights that stream to a GPU: results equal to the bit, graphs over ring buffers, and no more memory than allowed."""

import copy
import os

import pytest
import torch
from torch import nn

import accel
from accel.bench.memory import device_bytes, device_peak, release
from accel.diffusion import tiling
from accel.offload import budget
from accel.offload.blocks import nbytes
from accel.offload.budget import Budget
from accel.offload.call_hooks import streamed_model
from accel.offload.memory import HostBuffer
from accel.offload.streamed_model import StreamedModel
from support.objects.streaming import flux_on_card, within

CARD, ROOM = torch.device("cuda", 0), 2**28
ALONE = pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="reads the GPU's memory, which others take")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, width=2048, number=12):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(number))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("share", [0.4, 1.0])
@pytest.mark.parametrize("pinned", ["all", "half", "none"])
@torch.no_grad()
def test_blocks_stream_on_a_stream_of_their_own(share, pinned, monkeypatch):
    """Copies overlap calls, so that a missing event would show; staged ones too."""
    model = Stack().cuda()
    x = torch.randn(4096, 2048, device="cuda")
    wanted, before = model(x), {name: one.cpu() for name, one in model.state_dict().items()}
    if pinned == "none":
        monkeypatch.setattr(HostBuffer, "pin", lambda self, most=None, empty=False: None)
    host = nbytes(model) // 2 if pinned == "half" else None
    held = StreamedModel(model, CARD, lambda *given: None, Budget(within(model, share, 2**29), host), alone=True)
    for _ in range(6):
        assert torch.equal(model(x), wanted)
    assert held.streamed and (share == 1.0) == (len(held.streamed) == len(held.order))
    assert (held.ring.staging is None) == (pinned == "all")
    held.let_go()
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


@pytest.mark.parametrize("graphs", [True, False])
@torch.no_grad()
def test_a_denoiser_is_equal_to_the_bit_and_its_graphs_replay(graphs):
    model, call = flux_on_card()
    twin = accel.optimize(copy.deepcopy(model), graphs=graphs)
    wanted = [call(twin) for _ in range(16)][-1]
    stock = call(copy.deepcopy(model))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    accel.optimize(model, memory=within(model, 0.5, ROOM), graphs=graphs)
    for _ in range(20):
        got = call(model)
    assert torch.equal(got, wanted), float((got - wanted).abs().max())
    assert streamed_model(model).streamed
    rows = accel.report(model).graphs
    if graphs:
        assert [row["status"] for row in rows] == ["graph"], rows
        runner = vars(model)["forward"].runner
        replays = runner.replays
        assert torch.equal(call(model), wanted) and runner.replays == replays + 1
        model.transformer_blocks[1].attn.to_q.weight.data *= 1.5  # on the CPU, where it is outside of calls
        twin.transformer_blocks[1].attn.to_q.weight.data *= 1.5
        assert torch.equal(call(model), call(twin))
        model.transformer_blocks[1].attn.to_q.weight.data.copy_(before["transformer_blocks.1.attn.to_q.weight"])
    accel.restore(model)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert {one.device for one in model.parameters()} == {CARD}
    assert torch.equal(call(model), stock)


@ALONE
@torch.no_grad()
def test_the_device_never_has_more_in_use_than_allowed():
    model, call = flux_on_card(8, 24)
    wanted = call(copy.deepcopy(model))
    cap = within(model, 0.6, 2**29)
    model.cpu()
    release(CARD)
    before, total = device_bytes(CARD), torch.cuda.get_device_properties(CARD).total_memory
    torch.cuda.set_per_process_memory_fraction(cap / total)
    try:
        with device_peak(CARD) as peak:
            accel.optimize(model, memory=cap)
            for _ in range(16):
                got = call(model)
        assert peak[0] - before <= cap, (peak[0] - before, cap, streamed_model(model).measured)
        assert torch.equal(got, call(model)) and float((got - wanted).abs().max()) < 0.05 * float(wanted.abs().max())
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    accel.restore(model)
    del got, wanted
    release(CARD)
    assert device_bytes(CARD) - before < 2**28  # kernels and workspaces


@pytest.mark.parametrize("switch", [None, "enable_model_cpu_offload", "enable_sequential_cpu_offload"])
@torch.no_grad()
def test_models_of_a_pipeline_take_turns(sdxl_pipe, live, switch, monkeypatch):
    pipe = sdxl_pipe.to("cuda", torch.bfloat16)
    twin = accel.optimize(copy.deepcopy(pipe))
    if switch is not None:
        getattr(pipe, switch)()
    wanted = live.draw(twin)
    for module in (budget, tiling):
        monkeypatch.setattr(module, "SLACK", 0)
    accel.optimize(pipe, memory=int(0.6 * nbytes(pipe.unet)))
    for _ in range(4):
        assert live.rms(live.draw(pipe), wanted) < 2e-2
    assert streamed_model(pipe.unet) is not None
    accel.restore(pipe)
    assert live.rms(live.draw(pipe), wanted) < 2e-2
    assert {one.device.type for one in pipe.unet.parameters()} == {"cuda" if switch is None else "cpu", "meta"} - (
        {"meta"} if switch != "enable_sequential_cpu_offload" else {"cpu"}
    )


@pytest.mark.parametrize("weights", [None, "int4"])
@torch.no_grad()
def test_a_language_model_streams(weights):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 4}
    with torch.device("cuda"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=2048, num_hidden_layers=12, **sizes)).bfloat16().eval()
        ids = torch.randint(0, 2048, (2, 40))
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    twin = accel.optimize(copy.deepcopy(model), weights=weights)
    wanted = [twin.generate(ids, **call) for _ in range(3)][-1]
    quantized = accel.optimize(copy.deepcopy(model), weights=weights)
    allowed = within(quantized, 0.6, ROOM)
    del quantized
    accel.optimize(model, memory=allowed, weights=weights)
    for _ in range(3):
        model.generate(ids, **call)  # kernels are chosen, as the twin's were
    for _ in range(3):
        assert torch.equal(model.generate(ids, **call), wanted)
    assert streamed_model(model).streamed and not accel.report(model).fallbacks
    assert model.device == CARD
    accel.restore(model)
    assert {one.device for one in model.parameters()} == {CARD}


@torch.no_grad()
def test_refused_pinning_and_an_error_in_mid_stream():
    model, call = flux_on_card()
    twin = accel.optimize(copy.deepcopy(model), graphs=False)
    wanted = [call(twin) for _ in range(16)][-1]
    accel.optimize(model, memory=within(model, 1.0, ROOM), host_memory=nbytes(model) // 3, graphs=False)
    broken = model.single_transformer_blocks[2].register_forward_pre_hook(lambda *given: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            call(model)
    broken.remove()
    for _ in range(3):
        assert torch.equal(call(model), wanted)
