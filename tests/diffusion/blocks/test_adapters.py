"""Adapters on UNets, put on before or after optimize: what they are on runs its own forward inside of fused blocks."""

import copy

import pytest
import torch

import accel
from accel.diffusion.blocks.attention import AttentionForward
from accel.diffusion.blocks.resnet import ResnetForward
from accel.diffusion.blocks.transformer_2d import TransformerBlockForward, TransformerStackForward
from accel.quantization import adapters
from support.diffusion.outputs import close, run
from support.noted import call_counts

peft = pytest.importorskip("peft")
pytest.importorskip("peft.utils.hotswap")

AT = ["to_q", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]
AROUND = ["proj_in", "proj_out", "time_emb_proj"]
LORA = {"r": 2, "init_lora_weights": False}
KINDS = {
    "lora": ("Lora", LORA | {"target_modules": AT, "use_rslora": True}),
    "lora-around": ("Lora", LORA | {"target_modules": AROUND}),
    "lora-convolutions": ("Lora", LORA | {"target_modules": ["conv1", "conv2", "conv_shortcut"]}),
    "lora-bias": ("Lora", LORA | {"target_modules": AT, "lora_bias": True}),
    "dora": ("Lora", LORA | {"target_modules": AT + AROUND, "use_dora": True}),
    "loha": ("LoHa", {"r": 2, "target_modules": [*AT, "proj_in", "conv1"], "init_weights": False}),
    "lokr": ("LoKr", {"r": 2, "target_modules": AT, "init_weights": False}),
    "ia3": ("IA3", {"target_modules": ["to_k", "to_v", "ff.net.2"], "feedforward_modules": ["ff.net.2"]}),
}
FUSED = (AttentionForward, TransformerBlockForward, TransformerStackForward, ResnetForward)


@pytest.fixture
def ran(monkeypatch):
    """How often forwards of each class ran fused, inside others too."""
    names = ("attended", "advance", "fast", "fast")
    return call_counts(monkeypatch, {kind: (kind, name) for kind, name in zip(FUSED, names, strict=True)})


def put_on(unet, kind, seed=5, name="default"):
    kind, settings = KINDS[kind]
    torch.manual_seed(seed)
    unet.add_adapter(getattr(peft, f"{kind}Config")(**settings), adapter_name=name)
    for parameter in unet.parameters():  # IA3 begins with ones
        if parameter.requires_grad and float(parameter.detach().std()) == 0:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    unet.requires_grad_(False).eval()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
@pytest.mark.share(12)
@pytest.mark.turns(2)
def test_every_kind(family, kind, after, tiny, ran, monkeypatch):
    stock = tiny.unet(family)
    inputs, plain = tiny.inputs(stock), run(stock, tiny.inputs(stock))
    ours = copy.deepcopy(stock)
    if after:
        accel.optimize(ours)
    for unet in (ours, stock):
        put_on(unet, kind)
    if not after:
        accel.optimize(ours)
    ran.clear()  # trials count too
    added, add = [], adapters.add_low_rank
    monkeypatch.setattr(adapters, "add_low_rank", lambda x, y, one: added.append(one) or add(x, y, one))
    close(run(ours, inputs), run(stock, inputs))
    assert float((run(stock, inputs) - plain).abs().max()) > 1e-3
    names = [name.rpartition(".")[2] for name, _ in ours.named_modules()]
    attentions, resnets = (names.count("attn1") + names.count("attn2"), names.count("conv1"))
    assert [ran[kind] for kind in FUSED] == [attentions, attentions // 2, names.count("transformer_blocks"), resnets]
    report = accel.report(ours)
    assert not report.fallbacks
    understood = kind == "lora" or (kind == "lora-around" and family == "sdxl")  # in the other it is on convolutions
    told = any("runs its own forward" in reason for *_, status, reason in report.sites if status == "patched")
    assert told is not understood and bool(added) is (kind in ("lora", "lora-around"))
    accel.restore(ours)
    assert torch.equal(run(ours, inputs), run(stock, inputs))


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
@pytest.mark.turns(2)
def test_adapters_are_switched_scaled_merged_and_taken_off(family, tiny):
    stock = tiny.unet(family)
    inputs, ours = tiny.inputs(stock), accel.optimize(copy.deepcopy(stock))
    pair, seen = (ours, stock), [run(stock, inputs)]

    def change(what, differs=True):
        for unet in pair:
            what(unet)
        wanted = run(stock, inputs)
        close(run(ours, inputs), wanted)
        assert not differs or float((wanted - seen[-1]).abs().max()) > 1e-4
        seen.append(wanted)

    change(lambda unet: put_on(unet, "lora", 1, "style"))
    change(lambda unet: put_on(unet, "lora", 2, "detail"))
    change(lambda unet: unet.set_adapters(["style", "detail"], [0.3, 0.8]))
    change(lambda unet: unet.set_adapters(["style"], [0.9]))
    with torch.no_grad():
        wanted = stock(**inputs, cross_attention_kwargs={"scale": 0.5}).sample
        close(ours(**inputs, cross_attention_kwargs={"scale": 0.5}).sample, wanted)
    assert float((wanted - seen[-1]).abs().max()) > 1e-4
    change(lambda unet: unet.disable_adapters())
    change(lambda unet: unet.enable_adapters())
    change(lambda unet: unet.fuse_lora(lora_scale=0.7))
    change(lambda unet: unet.unfuse_lora(), differs=False)
    change(lambda unet: [p.data.mul_(1.5) for name, p in unet.named_parameters() if "lora_B" in name])
    # Factors become tensors, which are written into when another adapter is loaded in the place of this one.
    change(lambda unet: peft.utils.hotswap.prepare_model_for_compiled_hotswap(unet, target_rank=4), differs=False)
    change(lambda unet: [one.scaling["style"].fill_(0.2) for one in unet.modules() if hasattr(one, "lora_A")])
    change(lambda unet: unet.delete_adapters("style"))
    change(lambda unet: unet.unload_lora())
    torch.testing.assert_close(seen[-1], seen[0], rtol=0, atol=1e-5)
    assert not accel.report(ours).fallbacks


def test_a_layer_of_ones_own_is_left_alone(tiny):
    """Its code may keep state, which a trial would change."""

    class Counting(torch.nn.Linear):
        calls = 0

        def forward(self, input):
            self.calls += 1
            return super().forward(input)

    stock = tiny.unet()
    for name, attention in stock.named_modules():
        if name.endswith("attn1"):
            own = Counting(attention.to_q.in_features, attention.to_q.out_features, bias=False)
            own.load_state_dict(attention.to_q.state_dict())
            attention.to_q = own
    ours, inputs = copy.deepcopy(stock), tiny.inputs(stock)
    accel.optimize(ours)
    close(run(ours, inputs), run(stock, inputs))
    calls = [[m.calls for m in unet.modules() if type(m) is Counting] for unet in (ours, stock)]
    assert calls[0] == calls[1] == [1] * len(calls[0])
    assert any("is not the library's own" in reason for *_, reason in accel.report(ours).sites)
