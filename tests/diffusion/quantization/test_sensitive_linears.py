"""Which linears of diffusion transformers stay in 16 bits: modulations, and what is in no block. Nothing of attentions
or feed-forwards.
"""

import re

import pytest
import torch
from torch import nn

import accel
from accel.diffusion.linears import MODULATES, OUTSIDE, denoiser_linears, sensitive_linears
from accel.quantization.module import QuantizedLinear
from accel.quantization.scheme import Scheme
from benchmarks.models.tiny_denoisers import DITS, given, transformer
from support.compatibility.tiny_diffusers_models import build
from support.diffusion.library_formats import in_blocks
from support.diffusion.outputs import run
from support.diffusion.tiny_models import UNETS
from support.patched import sites

# A path up to the inside of a block; what Chroma computes modulations with has layers too.
BLOCK = re.compile(r"(?:\w*blocks(?:\.image(?:_cond)?)?|(?<!guidance_layer\.)layers|\w*refiner)\.\d+\.")
BOTH = r"norm1(_context)?\.linear"
# What makes scales, shifts and gates within a block; elsewhere it lies outside of them, or is a table.
MODULATIONS = {
    "FluxTransformer2DModel": rf"{BOTH}|norm\.linear",
    "Flux2Transformer2DModel": "",
    "Flux3Transformer2DModel": "",
    "SD3Transformer2DModel": BOTH,
    "WanTransformer3DModel": "",
    "LTXVideoTransformer3DModel": "",
    "QwenImageTransformer2DModel": r"(img|txt)_mod\.1",
    "ZImageTransformer2DModel": r"adaLN_modulation\.0",
    "PixArtTransformer2DModel": "",
    "HunyuanVideoTransformer3DModel": rf"{BOTH}|norm(_out)?\.linear",
    "HunyuanDiT2DModel": r"norm1\.linear",
    "CogVideoXTransformer3DModel": r"norm[12]\.linear",
    "CogView4Transformer2DModel": r"norm1\.linear",
    "AuraFlowTransformer2DModel": BOTH,
    "SanaTransformer2DModel": "",
    "SanaWMTransformer3DModel": "",
    "Lumina2Transformer2DModel": r"norm1\.linear",
    "HiDreamImageTransformer2DModel": r"block\.adaLN_modulation\.1",
    "ChromaTransformer2DModel": "",
    "MochiTransformer3DModel": rf"{BOTH}(_1)?",
    "CosmosTransformer3DModel": r"norm[123]\.linear_[12]",
    "DiTTransformer2DModel": r"norm1\.(emb\.timestep_embedder\.linear_[12]|linear)",
    "Kandinsky6Transformer3DModel": r"(\w+_dec_block\.)?\w+_modulation\.out_layer",
    "StableAudioDiTModel": "",
    "WanVACETransformer3DModel": "",
    "FluxControlNetModel": rf"{BOTH}|norm\.linear",
}


def linears(model):
    return {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}


@pytest.mark.parametrize("name", MODULATIONS)
def test_what_modulates_and_what_is_in_no_block(name):
    model = build(name)
    wanted, known = {}, set()
    for path in linears(model):
        block = BLOCK.search(path)
        if block is None:
            wanted[path] = OUTSIDE
        elif re.fullmatch(MODULATIONS[name], path[block.end() :]):
            wanted[path] = MODULATES
            known.add(path)
    found = denoiser_linears(model, Scheme.parse("int8"))
    assert found.kept == wanted and bool(known) == bool(MODULATIONS[name])
    assert found.chosen.keys() | found.skipped.keys() == linears(model).keys() - wanted.keys()
    assert len(found.chosen) >= 6


def test_a_modulation_that_is_a_linear_of_the_block_itself():
    from diffusers import Ideogram4Transformer2DModel

    config = {key: value for key, value in build("Ideogram4Transformer2DModel").config.items() if key[0] != "_"}
    model = Ideogram4Transformer2DModel(**config | {"adaln_dim": 48})
    kept = denoiser_linears(model, Scheme.parse("int8")).kept
    assert [path for path, reason in kept.items() if reason == MODULATES] == ["layers.0.adaln_modulation"]


def test_beneath_adapters():
    peft = pytest.importorskip("peft")
    model = transformer("flux")
    plain = denoiser_linears(model, Scheme.parse("int8"))
    targets = ["norm1.linear", "norm.linear", "x_embedder", "to_q", "to_out.0", "proj_mlp", "proj_out", "net.2"]
    model.add_adapter(peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    found = denoiser_linears(model, Scheme.parse("int8"))
    for before, now in zip(plain, found, strict=True):
        assert {path.removesuffix(".base_layer"): value for path, value in now.items()} == before
    assert sum(path.endswith("base_layer") for path in found.kept) == 4


@pytest.mark.parametrize("name", [*UNETS, "StableCascadeUNet", "UNetMotionModel"])
def test_none_of_unets(name, unet):
    assert sensitive_linears(unet(name) if name in UNETS else build(name)) == {}


@pytest.mark.parametrize("name", DITS)
def test_the_report_tells_why_and_strict_takes_it(name):
    model = accel.optimize(transformer(name), weights="int8", strict=True)
    told = sites(model, "weights")
    status, whole = told.pop("")
    kept = {path: reason for path, (now, reason) in told.items() if now == "skipped"}
    assert set(kept.values()) == ({OUTSIDE} if name == "pixart" else {OUTSIDE, MODULATES})
    assert all(type(module) is nn.Linear for module in map(model.get_submodule, kept))
    assert {path for path, module in linears(model).items() if type(module) is not QuantizedLinear} == kept.keys()
    size = sum(model.get_submodule(path).weight.nbytes for path in kept)
    before = sum(p.nbytes for p in transformer(name).parameters())
    assert f"{len(kept)} linears that modulate or lie in no block, {size / before:.0%}, and all else stay" in whole
    assert status == "patched" and run(model, given(name)).isfinite().all()


def test_what_is_in_8_bits_already_is_not_told_to_be_in_16(monkeypatch):
    with monkeypatch.context() as all_of_them:
        all_of_them.setattr("accel.diffusion.linears.sensitive_linears", lambda model: {})
        model = accel.optimize(transformer("flux"), weights="int8")
    found = denoiser_linears(model, Scheme.parse("int8"))
    assert set(found.kept) == {"context_embedder", "x_embedder", "proj_out"}
    assert set(found.skipped.values()) == {"is int8 by row already"} and not found.chosen


def test_what_came_in_blocks_is_not_told_to_be_in_16_bits():
    model = in_blocks(build("FluxTransformer2DModel"), "Q8_0", torch.float32)
    own = model.get_submodule("transformer_blocks.0.ff.net.2")
    model.set_submodule("transformer_blocks.0.ff.net.2", nn.Linear(own.in_features, own.out_features))
    first = model.time_text_embed.timestep_embedder
    first.linear_1 = nn.Linear(first.linear_1.in_features, first.linear_1.out_features)
    first.linear_1._parameters["weight"] = first.linear_1.weight.detach()  # as diffusers leaves what a file has plain
    told = sites(accel.optimize(model, weights="int8"), "weights")
    blocks = {path for path, module in model.named_modules() if type(module).__name__ == "GGUFLinear"}
    assert len(blocks) > 9 and {path: told[path][1] for path in blocks & told.keys()} == dict.fromkeys(
        blocks & told.keys(), "is Q8_0 already"
    )
    assert told["time_text_embed.timestep_embedder.linear_1"][1] == OUTSIDE and told[""][0] == "patched"


def test_a_model_that_calls_the_time_by_a_letter_takes_weights():
    model = accel.optimize(build("ZImageTransformer2DModel"), weights="int8")
    paths = {row["path"] for row in accel.report(model).weights}
    assert "layers.0.attention.to_q" in paths and "noise_refiner.0.feed_forward.w1" in paths
    assert not any("modulation" in path for path in paths)
    stock = build("ZImageTransformer2DModel").parameters()
    assert all(torch.equal(a, b) for a, b in zip(accel.restore(model).parameters(), stock, strict=True))
