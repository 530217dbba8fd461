"""Folders of quantized models, as transformers loads them with compressed-tensors."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import accel
from support.llm.families import make


def saved_folders(tmp_path_factory):
    """A function of (name, scheme, dtype): where such a model, quantized, is saved; with " bytes" as others save it."""
    made = {}

    def folder(name="llama-biases", scheme="int8", dtype=torch.float32):
        key = (name, scheme, dtype)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("saved")
            scheme, *rest = scheme.split()
            accel.quantize(make(name, dtype), scheme).save_pretrained(made[key])
            if rest:
                unpack(made[key])
        return made[key]

    return folder


def unpack(folder):
    """A file of packed 8-bit numbers in the format "int-quantized", a byte each."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    file, config = folder / "model.safetensors", folder / "config.json"
    found = load_file(file)
    for path in [name.removesuffix("_packed") for name in found if name.endswith("_packed")]:
        shape = found.pop(f"{path}_shape")
        found[path] = unpack_from_int32(found.pop(f"{path}_packed"), 8, shape)
        if f"{path}_zero_point" in found:
            zeros = unpack_from_int32(found[f"{path}_zero_point"], 8, torch.Size((shape[0], 1)), packed_dim=0)
            found[f"{path}_zero_point"] = zeros.contiguous()
    save_file(found, file, {"format": "pt"})
    said = json.loads(config.read_text())
    said["quantization_config"].pop("dequantize", None)
    config.write_text(json.dumps(said).replace("pack-quantized", "int-quantized"))


def compressed(folder):
    pytest.importorskip("compressed_tensors")
    return AutoModelForCausalLM.from_pretrained(folder).eval()
