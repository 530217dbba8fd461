"""Checkpoints of compressed-tensors, GPTQ, AWQ and bitsandbytes."""

import copy

import pytest
import torch
from accel_kernels.gemm.quantized_weight import pack
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import accel
from accel.options import SCHEMES as NAMES
from accel.quantization.formats import compressed_tensors as compressed
from accel.quantization.rounding import round_to_nearest
from accel.quantization.scheme import Scheme
from support.llm.families import layers, make, padded
from support.llm.outputs import generate, same
from support.llm.prequantized.models import compressed as loaded
from support.llm.quantized import held_by, logits, sites

SCHEMES = [Scheme.parse(name) for name in NAMES] + [Scheme("int8", 32), Scheme("int4", None, False)]
SHAPES = [(16, 128), (19, 384), (33, 256)]


def weight(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype) * 0.1 + 0.03


def package(scheme: Scheme):
    """The package's own scheme and compressor for ours."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig.model_validate(compressed.config({"a": scheme}, ["lm_head"]))
    theirs = config.config_groups["group_0"]
    return theirs, BaseCompressor.get_value_from_registry(theirs.format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_package_reads_what_we_write_and_writes_the_same(scheme, shape, dtype):
    theirs, compressor = package(scheme)
    ours = round_to_nearest(weight(*shape, dtype), scheme)
    parts = compressed.parts(ours)
    assert set(parts) == set(compressor.compression_param_names(theirs))
    unpacked = compressor.decompress(dict(parts), theirs)
    assert torch.equal(unpacked["weight"], ours.dequantized(dtype))
    if dtype != torch.float32:
        return  # rounded once more, they are not the same numbers again
    state = {"weight": unpacked["weight"], "weight_scale": ours.scales}
    if ours.zeros is not None:
        state["weight_zero_point"] = ours.zeros
    again = compressor.compress(state, theirs)
    assert again.keys() == parts.keys()
    for name, tensor in again.items():
        assert tensor.dtype == parts[name].dtype and torch.equal(tensor, parts[name]), name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_reading_takes_writing_back(scheme, shape):
    """Without a copy, but for 8-bit integers, which lie otherwise in memory."""
    ours = round_to_nearest(weight(*shape), scheme)
    again = compressed.read(compressed.parts(ours))
    assert ours.parts().keys() == again.parts().keys()
    for name, one in ours.parts().items():
        other = again.parts()[name]
        assert one.dtype == other.dtype and torch.equal(one.float(), other.float())
    assert scheme.weight_dtype == "int8" or again.data.data_ptr() == ours.data.data_ptr()
    assert again.scales.data_ptr() == ours.scales.data_ptr()
    expected = Scheme(scheme.weight_dtype, None if scheme.group == shape[1] else scheme.group, scheme.symmetric)
    assert compressed.scheme_of(again) == expected


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
def test_eight_bits_not_packed_as_files_with_activations_have_them(symmetric, shape):
    ours = round_to_nearest(weight(*shape), Scheme("int8", None, symmetric))
    parts = {"weight": ours.data, "weight_scale": ours.scales, "weight_zero_point": ours.zeros}
    again = compressed.read(parts)
    assert again.data is ours.data and again.scales is ours.scales and again.zeros is ours.zeros


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(8, None), (8, 32), (2, 32), (3, 32), (5, None)])
def test_numbers_packed_as_other_tools_write_them(bits, group, symmetric):
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    wide = round_to_nearest(weight(19, 128), Scheme("int8", group, symmetric))
    numbers, scales, zeros = wide.data >> 8 - bits, wide.scales, None if symmetric else wide.zeros >> 8 - bits
    parts = {"weight_packed": pack_to_int32(numbers, bits), "weight_scale": scales}
    parts["weight_shape"] = torch.tensor(wide.shape)
    if not symmetric:
        parts["weight_zero_point"] = pack_to_int32(zeros, bits, packed_dim=0)
    again = compressed.read(parts)
    assert torch.equal(again.numbers(), numbers) and again.scales is scales
    assert symmetric or torch.equal(again.zeros, zeros)
    assert again.format.bits == (4 if bits < 4 else 8)
    assert torch.equal(pack(again.numbers(), bits), parts["weight_packed"])


def test_a_scale_for_all_is_one_for_each_row():
    data = torch.randn(16, 32).to(torch.float8_e4m3fn)
    for scale in (torch.tensor(0.25), torch.tensor([0.25]), torch.tensor([[0.25]])):
        read = compressed.read({"weight": data, "weight_scale": scale})
        assert torch.equal(read.dequantized(torch.float32), data.float() * 0.25) and read.scales.shape == (16, 1)


GOOD = compressed.parts(round_to_nearest(weight(16, 64), Scheme("int4", 32, False)))
WRONG = {
    "no weight_scale": {"weight_scale": None},
    "scales of dtype torch.int8": {"weight_scale": torch.ones(16, 2, dtype=torch.int8)},
    r"scales \(16, 3\) for a weight \(16, 64\)": {
        "weight_scale": torch.ones(16, 3),
        "weight_zero_point": torch.zeros(2, 3, dtype=torch.int32),
    },
    r"scales \(8, 2\) for a weight \(16, 64\)": {"weight_scale": torch.ones(8, 2)},
    "no weight_shape": {"weight_shape": None},
    r"a packed weight \(16, 8\) for the shape \(16, 80\)": {"weight_shape": torch.tensor([16, 80])},
    r"a packed weight \(16, 8\) for the shape \(12, 64\)": {"weight_shape": torch.tensor([12, 64])},
    r"a packed weight \(16, 8\) of torch.int64": {"weight_packed": torch.ones(16, 8, dtype=torch.int64)},
    r"packed zero points \(16, 2\) of torch.int8": {"weight_zero_point": torch.ones(16, 2, dtype=torch.int8)},
    "no matrix of int8 or float8_e4m3fn": {"weight_packed": None, "weight": torch.ones(16, 64)},
}


@pytest.mark.parametrize("message", WRONG)
def test_parts_that_do_not_fit_are_refused(message):
    with pytest.raises(ValueError, match=message):
        compressed.read(GOOD | WRONG[message])


def test_one_bit_and_odd_inputs_are_refused():
    one = {"weight_packed": torch.ones(16, 2, dtype=torch.int32), "weight_scale": torch.ones(16, 1)}
    with pytest.raises(ValueError, match="not of 2 to 8 bits"):
        compressed.read(one | {"weight_shape": torch.tensor([16, 64])})
    odd = {"weight": torch.ones(16, 30, dtype=torch.int8), "weight_scale": torch.ones(16, 1)}
    with pytest.raises(ValueError, match="30 inputs, not a multiple of 8"):
        compressed.read(odd)


def test_several_schemes_are_several_groups_by_name():
    schemes = {"a.b": Scheme("int8"), "a.c": Scheme("int4", 64), "a.d": Scheme("int8")}
    config = compressed.config(schemes, ["lm_head"])
    assert [group["targets"] for group in config["config_groups"].values()] == [["a.b", "a.d"], ["a.c"]]
    assert config["format"] == "pack-quantized" and config["ignore"] == ["lm_head"]
    assert compressed.config(schemes | {"a.e": Scheme("fp8")}, [])["format"] == "mixed-precision"


def test_zero_points_are_packed_along_the_rows():
    zeros = torch.arange(-8, 8, dtype=torch.int8).reshape(8, 2).repeat(3, 1)[:19]
    words = compressed.packed_zeros(zeros)
    assert words.shape == (3, 2) and torch.equal(words[0], pack(zeros[:8].t().contiguous()).flatten())
    assert torch.equal(compressed.unpacked_zeros(words, 19), zeros)
    assert round_to_nearest(weight(19, 64), Scheme("int4", 32, False)).zeros.shape == (19, 2)


SIZES = {"intermediate_size": 128}  # which its 4 bits divide


def rows(model) -> dict[str, str]:
    return {path: reason for path, rule, _, reason in accel.report(model).sites if rule == "weights"}


@pytest.fixture(scope="module")
def from_bitsandbytes(tmp_path_factory):
    """By the bits: what transformers makes of a folder."""
    pytest.importorskip("bitsandbytes")
    folder = tmp_path_factory.mktemp("plain")
    make("llama-biases", **SIZES).save_pretrained(folder)

    def load(bits: int):
        asked = BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4)
        return AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=asked, dtype=torch.float32, device_map="cpu"
        ).eval()

    return load


@pytest.mark.parametrize("called", [False, True])
def test_eight_bits_of_bitsandbytes_are_repacked_and_given_back(called, from_bitsandbytes):
    model, twin, fresh = from_bitsandbytes(8), make("llama-biases", **SIZES), from_bitsandbytes(8)
    found = {}
    for path, layer in layers(model).items():
        for where, linear in layer.named_modules():
            if hasattr(linear, "weight") and linear.weight.dtype == torch.int8:
                values = linear.weight.data.float() * linear.weight.SCB[:, None] / 127
                twin.get_submodule(f"{path}.{where}").weight.data = values
                found[f"{path}.{where}"] = linear
    assert len(found) == 14
    wanted = logits(fresh)["logits"]
    if called:
        assert torch.equal(logits(model)["logits"], wanted)
    accel.optimize(model)
    assert rows(model).keys() == found.keys() and len(held_by(model)) == 14
    assert all("int8 by row, arrived as bitsandbytes int8" in reason for reason in rows(model).values())
    same(generate(model, *padded()), generate(twin, *padded()))
    assert accel.verify(model).passed
    accel.restore(model)
    assert all(model.get_submodule(path) is linear for path, linear in found.items())
    assert torch.equal(logits(model)["logits"], wanted)


def test_four_bits_that_bitsandbytes_packs_anew_at_a_call_are_left_alone_and_told(from_bitsandbytes):
    from bitsandbytes.functional import has_avx512bf16

    model, stock = from_bitsandbytes(4), from_bitsandbytes(4)
    accel.optimize(model)
    assert len(rows(model)) == 14 and not held_by(model)
    said = "in another way at a call" if has_avx512bf16() else "read as it came"
    assert all(said in reason for reason in rows(model).values())
    same(generate(model, *padded()), generate(stock, *padded()))


def packed(kind: type, linear: nn.Linear, rounded, scrambled: bool) -> nn.Module:
    """As GPTQModel packs it. scrambled: the groups of its columns are in an order of their own."""
    n, k = rounded.shape
    made = kind(
        bits=4, group_size=rounded.group, sym=False, desc_act=scrambled, in_features=k, out_features=n,
        bias=linear.bias is not None, pack_dtype=torch.int32, register_buffers=True,
    )  # fmt: skip
    plain, groups = copy.deepcopy(linear).half(), torch.arange(k) // rounded.group
    plain.weight.data = rounded.dequantized(torch.float16)
    if scrambled:
        order = torch.randperm(k)
        plain.weight.data, groups = plain.weight.data[:, order].contiguous(), groups[order]
    made.pack(linear=plain, scales=rounded.scales, zeros=rounded.zeros.half() + 8, g_idx=groups)
    made.post_init()
    return made.eval()


@pytest.mark.parametrize(("module", "name"), [("torch", "TorchLinear"), ("torch_awq", "AwqTorchLinear")])
@pytest.mark.parametrize("scrambled", [False, True])
def test_four_bits_of_gptqmodel(module, name, scrambled):
    package = pytest.importorskip(f"gptqmodel.nn_modules.qlinear.{module}")
    if scrambled and module != "torch":
        pytest.skip("AWQ's columns are always in order")
    model, count = make("llama", torch.float16, **SIZES), 0
    for layer in layers(model).values():
        for where, linear in list(layer.named_modules()):
            if type(linear) is nn.Linear:
                rounded = round_to_nearest(linear.weight, Scheme.parse("int4-g32-asym"))
                layer.set_submodule(where, packed(getattr(package, name), linear, rounded, scrambled))
                count += 1
    with torch.no_grad():
        before = logits(model)
        accel.optimize(model)
        assert len(held_by(model)) == count and all(module.scheme.ordered == scrambled for module in held_by(model))
        same(logits(model), before, share=5e-3)  # of float16, whose last bits choose between near words
        accel.restore(model)
        assert torch.equal(logits(model)["logits"], before["logits"])


def test_quantized_activations_are_said(folders):
    model = loaded(folders("llama-biases", "fp8"))
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            module.quantization_scheme.input_activations = object()
    accel.optimize(model)
    assert all("activations keep their dtype" in reason for _, reason in sites(model).values())


def test_floats_of_4_bits_are_named():
    linear = nn.Linear(32, 2)
    linear.weight, linear.quantization_scheme = None, object()
    linear.register_buffer("weight_packed", torch.zeros(2, 16, dtype=torch.uint8))
    linear.register_buffer("weight_scale", torch.ones(2, 2))
    assert compressed.read_compressed_tensors(linear) == "numbers in floats of 4 bits are not read"
