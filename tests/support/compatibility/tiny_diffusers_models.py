"""Models of diffusers, tiny and with random weights: the defaults of their classes, each made small by its name."""

import importlib
import inspect
import re

import torch

from support.compatibility.compatibility_table import diffusion_classes
from support.compatibility.diffusers_demands import MODELS, W

HEADS, HEAD_DIM = 2, 16
LEVELS = (8, 16, 32, 64)  # channels of a model that has levels, by the order of their sizes
AXES = {1: (16,), 2: (8, 8), 3: (4, 6, 6), 4: (4, 4, 4, 4)}  # how a head's channels are shared among so many axes
# These set how parts fit together rather than how large they are.
KEPT = re.compile(
    r".*patch_size.*|.*kernel_size.*|conv_.*|.*sampl\w+_rate|.*rates?|.*ratio.*|.*scale.*|.*_mult|.*strides?|n_fft"
    r"|.*group_size|hop.*|downscale_factor|sliding_window"
)
# What an argument is in a tiny model, by the first pattern that its whole name fits; smaller defaults stay.
SIZES = (
    (r".*axes_dims?(_rope|_a)?|rope_axes_dim|rope_dim(_list)?|axes_dim_rope", AXES),
    (r".*block_out_channels|.*stage_channels|channels", LEVELS),
    (r".*ch(annel)?_mult(iples|ipliers)?|dim_mult|.*c_mults", (1, 2, 2, 2)),
    (r".*layers_per_block|num_(en|de)coder_blocks|.*repeat_mappers|.*transformer_depths", 1),
    (r".*(n_?layers|_layers|num_layers|depth|_blocks)", 1),
    (r".*num_kv_heads|.*key_value(_attention)?_heads|n_kv_heads", 1),
    (r".*(num_heads|attention_heads|n_?heads|dit_heads)", HEADS),
    (r".*(head_dim|dim_heads?|d_kv)", HEAD_DIM),
    (r".*norm_num_groups|groups|.*resnet_groups|(num_|n_)?(routed_)?experts", 4),
    (r".*vocab_size|.*codebook_size|num_vq_embeddings|num_embeds_ada_norm|num_class_embeds", 50),
    (r".*(ffn?_(inner_)?dim|ffn_hidden_size|intermediate_(size|dim)|d_ff)", 48),
    (r"(.*_)?(in|out)_channels|(in|out)(_visual)?_dim|io_channels|input_dims", 16),
    (r".*(latent_channels?|z_channels|latent_dim|z_dim)", 8),
    (r"sample_(size|height|width|frames)|image_size|base_(height|width)|resolution", 8),
    (r".*(_dim|_width|_size|_channels?|_dim2|hidden_size)|dim|d_model|ch|.*_dim_.*|.*embeds?_dim.*", W),
    (r"(pos_embed|max|rope)_?.*(seq|len|size|max).*", 64),
    (r"text_len.*|max_text_seq_length|num_embeddings|.*num_tokens", 7),
)


def build(name: str) -> torch.nn.Module:
    kind = getattr(importlib.import_module(diffusion_classes()[name]), name)
    demanded = MODELS.get(name, {})
    torch.manual_seed(1)
    parts = demanded["parts"](build) if "parts" in demanded else ()
    model = kind(*parts, **(arguments(kind) | demanded.get("config", {}))).eval()
    for parameter in model.parameters():  # what starts at zero would hide mistakes behind it
        parameter.data = parameter.data.float() + 0.05 * torch.randn(parameter.shape)
    return model


def arguments(kind: type) -> dict:
    """What the class is to be made with, where that is not its default."""
    known = list(inspect.signature(kind.__init__).parameters.values())[1:]
    given = {one.name: small(one.name, one.default) for one in known if one.default is not inspect.Parameter.empty}
    return {one.name: given[one.name] for one in known if one.name in given and given[one.name] != one.default}


def small(name: str, value):
    """What an argument of this name and default is in a tiny model: a number, or as many numbers as by default."""
    numbers = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers) or not numbers:
        return value
    size = None if KEPT.fullmatch(name) else next((size for what, size in SIZES if re.fullmatch(what, name)), None)
    if size is None:
        return value
    if isinstance(size, dict):
        made = size[len(numbers)]
    elif isinstance(size, tuple):
        order = sorted(set(numbers))
        made = [size[min(order.index(number), len(size) - 1)] for number in numbers]
    else:
        made = [min(number, size) for number in numbers]
    return type(value)(made) if isinstance(value, list | tuple) else made[0]
