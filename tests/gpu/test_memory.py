"""Weights that stream to a GPU: results equal to the bit, graphs over ring buffers, and no more memory than allowed."""

import copy
import os
from functools import partial

import pytest
import torch
from torch import nn

import accel
from accel.bench.memory import device_bytes, device_peak, release
from accel.cuda_graphs.host_copies import capture_with_copies as capture
from accel.cuda_graphs.runner import PATIENCE
from accel.diffusion import tiling
from accel.offload import budget
from accel.offload.blocks import nbytes
from accel.offload.budget import Budget
from accel.offload.call_hooks import streamed_model
from accel.offload.layout import weights_in
from accel.offload.memory import HostBuffer
from accel.offload.streamed_model import StreamedModel
from support.diffusion.library_formats import in_blocks, quantized
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


@pytest.mark.parametrize("held", [partial(in_blocks, name="Q8_0"), partial(quantized, format="bitsandbytes-nf4")])
@torch.no_grad()
def test_weights_in_the_formats_of_libraries_stream(held):
    """With their scales, and from wherever they are."""

    def made(place):
        model, call = flux_on_card()
        return held(model.cpu(), dtype=torch.bfloat16).to(place), call

    (fast, call), (stock, _) = made("cuda"), made("cuda")
    accel.optimize(fast)
    wanted, plain = [call(fast) for _ in range(16)][-1], call(stock)
    for place in ("cuda", "cpu"):
        model, _ = made(place)
        before = {name: one.clone() for name, one in model.state_dict().items()}
        accel.optimize(model, memory=within(model, 0.8, ROOM))
        for _ in range(20):
            got = call(model)
        assert torch.equal(got, wanted), float((got - wanted).abs().max())
        assert streamed_model(model).streamed and not accel.report(model).fallbacks
        accel.restore(model)
        assert {one.device.type for one in weights_in(model)} == {place}
        assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
        assert torch.equal(call(model.to("cuda")), plain)


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
    """Their graphs replay in the next call, though their weights have been away."""
    pipe = sdxl_pipe.to("cuda", torch.bfloat16)
    twin = accel.optimize(copy.deepcopy(pipe))
    if switch is not None:
        getattr(pipe, switch)()
    wanted = live.draw(twin, steps=PATIENCE)
    for module in (budget, tiling):
        monkeypatch.setattr(module, "SLACK", 0)
    captures = []
    monkeypatch.setattr(
        "accel.cuda_graphs.runner.capture_with_copies", lambda *given: (captures.append(1), capture(*given))[1]
    )
    accel.optimize(pipe, memory=int(0.6 * nbytes(pipe.unet)), graphs=True)
    for _ in range(4):
        captures.clear()
        assert live.rms(live.draw(pipe, steps=PATIENCE), wanted) < 2e-2
    assert streamed_model(pipe.unet) is not None
    graphs = [row["path"] for row in accel.report(pipe).graphs if row["status"] == "graph"]
    assert "unet" in graphs and not captures, (graphs, captures, accel.report(pipe).graphs)
    accel.restore(pipe)
    assert live.rms(live.draw(pipe, steps=PATIENCE), wanted) < 2e-2
    assert {one.device.type for one in pipe.unet.parameters()} == {"cuda" if switch is None else "cpu", "meta"} - (
        {"meta"} if switch != "enable_sequential_cpu_offload" else {"cpu"}
    )


@pytest.mark.parametrize("weights", [None, "int4"])
@torch.no_grad()
def test_a_language_model_streams(weights, tmp_path):
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
    if weights is None:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model.save_pretrained(tmp_path)
        assert torch.cuda.max_memory_allocated() - before < 2**23  # what stays on the card is not copied there first
    accel.restore(model)
    assert {one.device for one in model.parameters()} == {CARD}


def texts(rows, length):
    """Tokens, and a mask that shows fewer of each row than of the one before."""
    ids = torch.randint(2, 2048, (rows, length), device="cuda")
    return ids, (torch.arange(length, device="cuda") < length - 9 * torch.arange(rows, device="cuda")[:, None]).long()


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("kind", ["t5", "bert"])
@torch.no_grad()
def test_an_encoder_streams_fused(kind, share):
    """Its layers run one by one, on packed tokens; small calls without padding in a graph."""
    from transformers import BertConfig, BertModel, T5Config, T5EncoderModel

    torch.manual_seed(0)
    with torch.device("cuda"):
        if kind == "t5":
            sizes = {"d_model": 1024, "d_kv": 64, "num_heads": 16, "d_ff": 2816, "num_layers": 12}
            model = T5EncoderModel(T5Config(vocab_size=2048, feed_forward_proj="gated-gelu", **sizes))
        else:
            sizes = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
            model = BertModel(BertConfig(vocab_size=2048, num_hidden_layers=12, **sizes))
    model = model.bfloat16().eval()
    ids, mask = texts(4, 200)
    calls = [{"input_ids": ids, "attention_mask": mask}, {"input_ids": ids[:1, :64]}]
    stock = [copy.deepcopy(model).float()(**call).last_hidden_state for call in calls]
    accel.optimize(model, memory=within(model, share))
    for call, wanted in zip(calls, stock, strict=True):
        got = [model(**call).last_hidden_state for _ in range(20)]
        seen = call.get("attention_mask", torch.ones_like(call["input_ids"])).bool()
        error = (got[-1][seen].float() - wanted[seen]).norm() / wanted[seen].norm()
        assert float(error) < 0.03 and all(torch.equal(one, got[-1]) for one in got[-4:])
    assert streamed_model(model).streamed and not accel.report(model).fallbacks


@torch.no_grad()
def test_an_encoder_and_its_decoder_stream_in_generate():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 1024, "d_kv": 64, "num_heads": 16, "d_ff": 2816, "num_layers": 8, "decoder_start_token_id": 0}
    with torch.device("cuda"):
        model = T5ForConditionalGeneration(T5Config(vocab_size=2048, feed_forward_proj="gated-gelu", **sizes))
    model = model.bfloat16().eval()
    ids, mask = texts(4, 100)
    told = {"max_new_tokens": 24, "return_dict_in_generate": True, "output_logits": True, "do_sample": False}

    def call(model):
        return torch.stack(model.generate(ids, attention_mask=mask, **told).logits)

    wanted = call(copy.deepcopy(model).float())[0]
    accel.optimize(model, memory=within(model, 1.0))
    got = [call(model) for _ in range(6)]
    assert float((got[-1][0].float() - wanted).norm() / wanted.norm()) < 0.05 and torch.equal(got[-1], got[-2])
    assert len(streamed_model(model).streamed) == 16 and not accel.report(model).fallbacks
    assert any(row["status"] == "graph" for row in accel.report(model).graphs), accel.report(model).graphs


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
