"""accel.load: the same model from the folder, never whole in memory; damaged files are named."""

import json
import shutil
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import accel
from accel.options import SCHEMES as NAMES
from support.everything import EVERYTHING
from support.llm.families import in_turn, make, padded
from support.llm.held_out import LiveBytes
from support.llm.outputs import generate, ran_fast, same
from support.llm.quantized import held_by, logits, whole_numbers, written_out

SCHEMES = [name for name in NAMES if name not in ("int4", "int4-asym", "int4-g64", "int4-g64-asym")]


@pytest.fixture
def saved(tmp_path):
    """saved(name, scheme): (the quantized model, its folder)."""

    def save(name="llama-biases", scheme="int8", dtype=torch.float32, **changes):
        model = accel.quantize(make(name, dtype, **changes), scheme)
        model.save_pretrained(tmp_path / "saved", max_shard_size="30KB" if name == "llama-tied" else "1GB")
        return model, tmp_path / "saved"

    return save


def forget_package(monkeypatch):
    """As where compressed-tensors is not installed."""
    import sys

    for name in [name for name in sys.modules if name.partition(".")[0] == "compressed_tensors"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)


FAMILIES = ("llama-biases", "llama-tied", "gpt-neox", "mixtral", "falcon-grouped")


@pytest.mark.parametrize(
    ("name", "scheme"),
    sorted(
        {*in_turn(FAMILIES, SCHEMES), *((name, scheme) for name in ("llama-tied", "mixtral") for scheme in SCHEMES)}
    ),
)
@pytest.mark.share(5)
@pytest.mark.turns(2)
def test_the_same_model(name, scheme, saved, monkeypatch):
    from transformers.quantizers import auto

    model, folder = saved(name, scheme)
    forget_package(monkeypatch)
    known = set(auto.AUTO_QUANTIZER_MAPPING)
    loaded = accel.load(folder)
    assert set(auto.AUTO_QUANTIZER_MAPPING) == known
    assert len(held_by(loaded)) == len(held_by(model)) and not loaded.training
    for mine, theirs in zip(held_by(loaded), held_by(model), strict=True):
        assert mine.scheme == theirs.scheme and mine.data.dtype == theirs.data.dtype
        assert torch.equal(mine.data, theirs.data) and torch.equal(mine.scales, theirs.scales)
        assert (mine.zeros is None) == (theirs.zeros is None)
        assert mine.zeros is None or torch.equal(mine.zeros, theirs.zeros)
    assert {n: p.shape for n, p in loaded.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert (logits(loaded)["logits"] - logits(model)["logits"]).abs().max() < 1e-5
    ids, mask = padded((9, 9))
    same(generate(accel.optimize(loaded), ids, mask), generate(model, ids, mask))
    ran_fast(loaded)


def test_in_the_dtype_asked_for(saved):
    model, folder = saved("llama-biases", "int4-g32-asym", torch.bfloat16)
    loaded = accel.load(folder)
    assert loaded.dtype == torch.bfloat16 and held_by(loaded)[0].dtype == torch.bfloat16
    assert held_by(loaded)[0].scales.dtype == torch.bfloat16
    wide = accel.load(folder, dtype=torch.float32, device="cpu")
    assert wide.dtype == torch.float32 and torch.equal(held_by(wide)[0].data, held_by(model)[0].data)
    assert logits(wide)["logits"].dtype == torch.float32


def test_small_scales_keep_their_precision(saved):
    """Which are float32 in a model of float16."""
    model = make("llama", torch.float16)
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data *= 1e-4
    accel.quantize(model, "int8")
    _, folder = saved()
    model.save_pretrained(folder)
    loaded = accel.load(folder)
    scales = loaded.model.layers[0].mlp.up_proj.scales
    assert scales.dtype == torch.float32 and torch.equal(scales, model.model.layers[0].mlp.up_proj.scales)


@pytest.mark.parametrize("scheme", ["int8", "int4-g32-asym"])
@pytest.mark.share(2)
@pytest.mark.turns(2)
def test_no_weight_is_ever_whole(scheme, saved):
    _, folder = saved("llama-biases", scheme, num_hidden_layers=3)
    with LiveBytes(counts=written_out) as counted:
        model = accel.load(folder)
    assert counted.most == 0 and len(held_by(model)) == 21
    with LiveBytes(counts=written_out) as counted:
        accel.optimize(model)(torch.tensor([[3, 4, 5]]))
    assert counted.most_tensors <= 7


@pytest.mark.parametrize(
    ("scheme", "activations"),
    [("int8", None), ("int8", "int8"), ("int8-asym", None), ("int4-g32-asym", None), ("fp8", None)],
)
def test_numbers_are_never_held_twice(scheme, activations, saved):
    """What stays, and besides it no more than one weight, of which a layer has seven."""
    model, folder = saved("llama-biases", scheme, num_hidden_layers=3)
    if activations is not None:
        for module in held_by(model):
            module.scheme = module.scheme.rounding(activations)
        model.save_pretrained(folder)
        assert "int-quantized" in (folder / "config.json").read_text()
    before = {file: file.read_bytes() for file in folder.glob("*.safetensors")}
    with LiveBytes(counts=whole_numbers) as counted:
        loaded = accel.load(folder)
    stays = sum(tensor.nbytes for m in held_by(loaded) for tensor in (m.data, m.zeros) if tensor is not None)
    assert counted.most <= stays + 96 * 64, f"{counted.most} bytes of {stays}"
    assert {module.activations for module in held_by(loaded)} == {activations}
    for mine, theirs in zip(held_by(loaded), held_by(model), strict=True):
        assert torch.equal(mine.data, theirs.data)
    assert {file: file.read_bytes() for file in folder.glob("*.safetensors")} == before


def test_it_can_be_saved_again(saved, tmp_path):
    _model, folder = saved("llama-biases", "int4-g32-asym")
    accel.load(folder).save_pretrained(tmp_path / "again")
    one, other = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "again"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "again"))
    assert before == after
    with pytest.raises(ValueError, match="nothing to quantize"):
        accel.quantize(accel.load(folder), "int8")


def test_an_unquantized_folder_and_transposed_weights(tmp_path):
    stock = make("llama")
    stock.save_pretrained(tmp_path / "plain")
    assert torch.equal(logits(accel.load(tmp_path / "plain"))["logits"], logits(stock)["logits"])
    model = accel.quantize(make("gpt2"), "int8")
    with pytest.warns(UserWarning, match="8 linear layers"):
        model.save_pretrained(tmp_path / "gpt2")
    assert torch.equal(logits(accel.load(tmp_path / "gpt2"))["logits"], logits(model)["logits"])


def test_what_the_package_itself_wrote(tmp_path):
    """Eight bits in words, as other tools store weights without activations."""
    package = pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config

    stock = make("llama-biases")
    weights = {"num_bits": 8, "strategy": "channel", "symmetric": True}
    config = QuantizationConfig(config_groups={"g": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"])
    apply_quantization_config(stock, config)
    for module in stock.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = module.weight.abs().amax(1, keepdim=True) / 127
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = package.ModelCompressor.from_pretrained_model(stock)
    compressor.compress_model(stock)
    stock.save_pretrained(tmp_path)
    compressor.update_config(str(tmp_path))
    assert "weight_packed" in " ".join(load_file(tmp_path / "model.safetensors"))
    loaded = accel.load(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(held_by(loaded)) == 14
    again = accel.optimize(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert len(held_by(again)) == 14
    wanted = logits(theirs)["logits"]
    assert all((logits(model)["logits"] - wanted).abs().max() < 1e-5 for model in (loaded, again))
    accel.restore(again)
    assert torch.equal(logits(again)["logits"], wanted)


# -- damaged -----------------------------------------------------------------------------------------------------------


def rewritten(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


UP = "model.layers.1.mlp.up_proj."


def configured(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def truncated(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def nan(tensors):
    tensors[UP + "weight_scale"][3] = float("nan")


DAMAGE = {
    "holds no config.json": lambda folder: (folder / "config.json").unlink(),
    "model.safetensors is missing": lambda folder: (folder / "model.safetensors").unlink(),
    "model.safetensors is damaged": truncated,
    r"mlp.up_proj: no weight_scale": lambda folder: rewritten(folder, lambda t: t.pop(UP + "weight_scale")),
    r"mlp.up_proj: a weight that is no matrix": lambda folder: rewritten(folder, lambda t: t.pop(UP + "weight_packed")),
    r"mlp.up_proj: NaN or Inf among its scales": lambda folder: rewritten(folder, nan),
    r"lacks model.norm.weight": lambda folder: rewritten(folder, lambda t: t.pop("model.norm.weight")),
    r"lacks model.layers.1.mlp.up_proj": lambda folder: rewritten(
        folder, lambda t: [t.pop(UP + n) for n in ("weight_scale", "weight_packed", "weight_shape", "bias")]
    ),
    r"layers.0.mlp.down_proj is \(64, 96\) in the file and \(64, 112\) in the model": lambda folder: configured(
        folder, intermediate_size=112
    ),
    r"quantizes model.layers.1.mlp.down_proj, which is no linear layer": lambda folder: configured(
        folder, num_hidden_layers=1
    ),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damaged_folders_are_named(message, saved):
    _, folder = saved(scheme="int4-g32")
    accel.load(folder)
    DAMAGE[message](folder)
    with pytest.raises(ValueError, match=message):
        accel.load(folder)


def test_damaged_shards_are_named(saved):
    _, folder = saved("llama-tied")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    index = folder / "model.safetensors.index.json"
    content, said = index.read_text(), json.loads(index.read_text())
    said["weight_map"]["model.more.weight"] = shards[0].name
    index.write_text(json.dumps(said))
    with pytest.raises(ValueError, match=f"{shards[0].name} lacks model.more.weight"):
        accel.load(folder)
    index.write_text("[1]")
    with pytest.raises(ValueError, match="index.json is damaged"):
        accel.load(folder)
    index.write_text(content)
    shutil.move(shards[1], folder / "elsewhere")
    with pytest.raises(ValueError, match=f"{shards[1].name} is missing"):
        accel.load(folder)


# -- settings that make no sense ---------------------------------------------------------------------------------------

NONSENSE = (0, -1, 1e9, 2.5, "x", None, [], {}, True, 10**12, "1" * 50)
SETTINGS = (
    "pad_token_id", "num_key_value_heads", "num_attention_heads", "head_dim", "hidden_size", "vocab_size",
    "intermediate_size", "num_hidden_layers", "hidden_act", "rms_norm_eps", "rope_parameters",
    "max_position_embeddings", "tie_word_embeddings", "attention_bias", "layer_types", "dtype", "eos_token_id",
    "initializer_range",
)  # fmt: skip
# So many layers, or so large weights, are made until memory ends.
ENDLESS = {("num_hidden_layers", value) for value in (1e9, 10**12, "1" * 50)}


@pytest.mark.share(1)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.turns(2)
def test_settings_that_make_no_sense_are_named(quantized, saved, tmp_path):
    """A folder loads, or a ValueError says what of it does not: nothing else is raised."""
    folder = tmp_path / "saved"
    if quantized:
        saved(num_hidden_layers=1)
    else:
        make("llama-biases", num_hidden_layers=1).save_pretrained(folder)
    before = (folder / "config.json").read_text()
    rows = list(product(SETTINGS, NONSENSE))
    for name, value in rows if EVERYTHING else rows[quantized::6]:
        if isinstance(value, int | float | str) and (name, value) in ENDLESS:
            continue
        configured(folder, **{name: value})
        try:
            accel.load(folder)
        except ValueError as error:
            assert str(folder) in str(error), (name, value, error)
        except Exception as error:
            pytest.fail(f"{name}={value!r}: {type(error).__name__}: {error}")
        (folder / "config.json").write_text(before)


@pytest.mark.share(1)
@pytest.mark.parametrize(
    ("name", "value"),
    [("pad_token_id", 10**9), ("num_key_value_heads", 0), ("num_attention_heads", 0), ("head_dim", -4)],
)
def test_the_setting_at_fault_is_named(name, value, saved):
    _, folder = saved(num_hidden_layers=1)
    configured(folder, **{name: value})
    with pytest.raises(ValueError, match=rf"config\.json: {name} is {value}: "):
        accel.load(folder)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_json_that_is_nested_deeply_is_named(file, saved):
    _, folder = saved(num_hidden_layers=1)
    (folder / file).write_text('{"a":' * 100_000)
    with pytest.raises(ValueError, match=str(folder)):
        accel.load(folder)


def test_what_its_package_alone_reads_is_loaded_by_it(saved):
    pytest.importorskip("compressed_tensors")
    _, folder = saved(scheme="fp8")
    said = json.loads((folder / "config.json").read_text())
    for group in said["quantization_config"]["config_groups"].values():
        group["weights"] |= {"strategy": "block", "block_structure": [16, 16]}
    (folder / "config.json").write_text(json.dumps(said))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        n, k = tensors[name.removesuffix("_scale")].shape
        tensors[name] = torch.rand(n // 16, k // 16, generator=torch.manual_seed(n + k)) / 448
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model, stock = accel.load(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.float8_e4m3fn
    same(generate(accel.optimize(model), *padded()), generate(stock, *padded()))
    ran_fast(model)
