"""Scripts that load quantized checkpoints of other libraries: saved in a folder, then from_pretrained as ever."""

import tempfile
from pathlib import Path
from typing import Any

import torch

import accel
from accel.bench.llm.models import endless
from accel.bench.scripts.generation import generating, published
from accel.bench.scripts.script import Built, Size, script

GROUP = 128
# Linears of 128 columns and more, as packed formats want them.
TINY = dict(hidden_size=128, intermediate_size=128, num_hidden_layers=1, head_dim=32)


def _loaded(folder: str, size: Size, **given: Any) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=size.bf16, device_map={"": size.device}, **given)
    return endless(model.eval().requires_grad_(False))


def _bits(size: Size, **given: Any) -> Built:
    from transformers import BitsAndBytesConfig

    with tempfile.TemporaryDirectory() as folder:
        published(size, "llama-1b", TINY).save_pretrained(folder)
        return generating(_loaded(folder, size, quantization_config=BitsAndBytesConfig(**given)), size, new=32)


@script("llama-bnb-4bit", "Llama-1B loaded in NF4 by bitsandbytes, 32 tokens", packages=("bitsandbytes",), cards=1)
def four_bits(size: Size) -> Built:
    return _bits(size, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=size.bf16)


@script("llama-bnb-8bit", "Llama-1B in LLM.int8 by bitsandbytes, 32 tokens", packages=("bitsandbytes",), cards=1)
def eight_bits(size: Size) -> Built:
    return _bits(size, load_in_8bit=True)


@script("llama-compressed", "Llama-1B in int4, a checkpoint of compressed-tensors", packages=("compressed_tensors",))
def compressed(size: Size) -> Built:
    with tempfile.TemporaryDirectory() as folder:
        accel.quantize(published(size, "llama-1b", TINY), "int4").save_pretrained(folder)
        return generating(_loaded(folder, size), size, new=32)


def _packed(size: Size, told: dict, tensors: dict[str, tuple[int, int]]) -> Built:
    """tensors: of a linear, by name what rows and columns are divided by; packed ones are whole words."""
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as folder:
        model = published(size, "llama-1b", TINY)
        model.config.quantization_config = told
        model.config.save_pretrained(folder)
        model.save_pretrained(folder, max_shard_size="100GB")
        file = Path(folder) / "model.safetensors"
        found = load_file(file)
        for path in [name for name in found if name.endswith("_proj.weight")]:
            outs, ins = found.pop(path).shape
            for name, (by_rows, by_columns) in tensors.items():
                shape = (ins // by_rows, outs // by_columns)
                words = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int64).int()
                one = torch.full(shape, 0.004, dtype=torch.float16) if name == "scales" else words
                found[path.replace("weight", name)] = one
            if told["quant_method"] == "gptq":
                found[path.replace("weight", "g_idx")] = (torch.arange(ins) // GROUP).int()
        save_file(found, file, {"format": "pt"})
        return generating(_loaded(folder, size), size, new=32)


@script("llama-gptq", "Llama-1B, a checkpoint of GPTQ in 4 bits, 32 tokens", packages=("gptqmodel",), cards=1)
def of_gptq(size: Size) -> Built:
    told = dict(quant_method="gptq", bits=4, group_size=GROUP, desc_act=False, sym=True, checkpoint_format="gptq")
    return _packed(size, told, {"qweight": (8, 1), "qzeros": (GROUP, 8), "scales": (GROUP, 1)})


@script("llama-awq", "Llama-1B, a checkpoint of AWQ in 4 bits, 32 tokens", packages=("gptqmodel",), cards=1)
def of_awq(size: Size) -> Built:
    told = dict(quant_method="awq", bits=4, group_size=GROUP, zero_point=True, version="gemm")
    return _packed(size, told, {"qweight": (1, 8), "qzeros": (GROUP, 8), "scales": (GROUP, 1)})
