"""A language model or encoder of any class of transformers at a tiny size, with random weights, on the CPU.

The configuration starts from its class's defaults. Its numbers are made small by what their names mean, its lists by
layer keep one or two layers of each kind. Several ways to do so are tried, until the model runs.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from accel.errors import reason_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY = 128
POSITIONS = 128
WINDOW = 32  # longer than the runs from which it is seen what layers compute, as published ones are
PROMPT = 50  # longer than a window
STEPS = 5  # tokens of a decoder
SPECIAL = 16  # ids below it may mean something
WIDTHS = (16, 48, 64, 96)
MOST_WEIGHTS = 100_000_000
LAYERS, MOST_LAYERS = 4, 8
# What a name says of a number, the first that fits, and the most that it may be; before them those that name tokens.
SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab", VOCABULARY),
    (r"codebooks", 1),
    (r"original_max|n_floor|floor_scale", WINDOW),
    (r"position_embeddings|n_positions|n_ctx|max_seq|(source|target)_positions|max_length|context_length", POSITIONS),
    (r"shared_layers|layers_shared", 2),
    (r"layer.*end", 3),
    (r"layers_per|dense_layers|first_k|layer.*start|max_window_layers|offset|nextn", 1),
    (r"period|interval|every_n|pattern|_step$|group_size", 2),
    (r"topk_group", 1),
    (r"window|local_attention|budget|chunk|block_size|extent|index.*topk$", WINDOW),
    (r"(n|num)(_expert)?_groups?$|o_groups|experts_per|moe_k|topk|top_k|shared_expert", 2),
    (r"expert_num|experts$|num_local_experts", 4),
    (r"rope_head_dim|rotary_dim|d_rel", 8),
    (r"head_dim|d_head|dim_head|headdim|head_size|kv_channels|pre_attn_scalar", 16),
    (r"indexer_kv", 1),
    (r"kv_heads|key_value_heads|key_heads|compress_ratio", 2),
    (r"heads?(_per_layer)?$", 4),
    (r"rank|centroids|d_state|state_size", 16),
    (r"multiple_of", 32),
    (r"moe_inter|expert_inter|expert_ffn", 48),
    (r"inter|ffn|inner|mlp|feed_forward|dff|_ff$|mid_dim", 96),
    (r"", 64),
)
DEPTH = re.compile(r"^((n|num)_(hidden_|decoder_|encoder_)?(layers?|blocks)|(de|en)coder_layers)$")
STRETCH = re.compile(r"^n(um)?_\w+_layers$")
TOKEN = re.compile(r"_(token_)?(id|index)$")
SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NOTHING: Mapping[str, dict] = MappingProxyType({})


class NotBuilt(RuntimeError):
    """No way to make a configuration small gave a model that runs; it holds what each way raised."""


def build_tiny(kind: "type[PreTrainedModel]", demands: Mapping[str, dict] = NOTHING) -> "PreTrainedModel":
    """A model of this class that runs on `tiny_prompt`, in float32. Raises NotBuilt.

    demands: by model type, fields that its configuration is to have; by "" what numbers of these names are in all.
    """
    errors: dict[str, None] = {}
    for config in tiny_configs(kind, demands):
        try:
            if isinstance(config, Exception):
                raise config
            return run_tiny(kind, config)
        except Exception as error:  # whatever a class raises that is not made for these sizes
            errors[" ".join(reason_of(error).split())[:300]] = None
    raise NotBuilt("; ".join(errors))


def run_tiny(kind: "type[PreTrainedModel]", config: "PreTrainedConfig") -> "PreTrainedModel":
    """The model of this configuration, once it has run. Raises whatever it raises, ValueError where it is too large."""
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in kind(config).parameters())
    if weights > MOST_WEIGHTS:
        raise ValueError(f"{weights:,} weights")
    for spread in (True, False):
        torch.manual_seed(0)
        model = kind(config).eval()
        if spread:
            randomize(model)
        with torch.no_grad():
            given = numbers_in(model(**tiny_call(model)))
        if given.isfinite().all():
            return model
    raise ValueError("its logits are not finite")


def numbers_in(output: Any) -> torch.Tensor:
    """The logits in what a model gave, or the hidden states of one that has none."""
    return output.logits if "logits" in output else output[0]


def tiny_prompt(model: "PreTrainedModel") -> torch.Tensor:
    """Ids of a prompt, (1, PROMPT): none that means something special."""
    words = min(VOCABULARY, model.config.get_text_config(decoder=True).vocab_size)
    return torch.randint(min(SPECIAL, words // 2), words, (1, PROMPT), generator=torch.Generator().manual_seed(0))


def tiny_call(model: "PreTrainedModel") -> dict[str, Any]:
    """Keywords of a call: ids of a prompt, or images or sound; and ids of a decoder where it has one beside."""
    from accel.encoders.inputs import encoders_in, inputs_of, small_call

    names, call = inspect.signature(type(model).forward).parameters, {}
    if "input_ids" not in names:
        inner = next(iter(encoders_in(model).values()), model)  # whose configuration says how large its inputs are
        encoder: Any = model.get_encoder() if "decoder_input_ids" in names else inner
        if (inputs := inputs_of(encoder)) is not None:
            call = small_call(encoder, inputs)
    call = call or {"input_ids": tiny_prompt(model)}
    if "decoder_input_ids" in names:
        rows = len(next(iter(call.values())))
        call["decoder_input_ids"] = tiny_prompt(model)[:, :STEPS].expand(rows, -1)
    return call


def randomize(model: nn.Module) -> None:
    """Larger weights than a model is trained from: with those attention is a mean, and a mistake in it hardly shows."""
    generator = torch.Generator().manual_seed(0)
    embeddings = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() < 2:
            parameter.data += 0.2 * noise
        elif id(parameter) in embeddings:
            parameter.data.copy_(0.3 * noise)
        else:
            parameter.data.copy_(1.6 * noise * parameter.shape[-1] ** -0.5)


def tiny_configs(
    kind: "type[PreTrainedModel]", demands: Mapping[str, dict] = NOTHING
) -> "Iterator[PreTrainedConfig | Exception]":
    """Small configurations of a model class, the likeliest first, or what was raised in making one."""
    ways = (Way(kinds=True), Way(), Way(fills=True, kinds=True), Way(fills=True), Way(scale=2))
    for way in ways:
        try:
            yield shrunk(kind.config_class, kind, way._replace(demands=demands))
        except Exception as error:  # a configuration checks what it is given
            reason_of(error)
            yield error


class Way(NamedTuple):
    """kinds: layers become of all kinds that the code knows. fills: numbers that are None get one. scale: of widths.

    demands: see `build_tiny`.
    """

    kinds: bool = False
    fills: bool = False
    scale: int = 1
    demands: Mapping[str, dict] = NOTHING


def shrunk(config_class: "type[PreTrainedConfig]", kind: "type[PreTrainedModel]", way: Way) -> "PreTrainedConfig":
    """A small configuration of this class. Raises what the class raises."""
    declared = {one.name: getattr(config_class, one.name, None) for one in fields(config_class)}
    try:
        base = config_class()
        base.allow_global_per_layer_attribute_access = True  # or it raises, where some layers have others
        found = {name: getattr(base, name, value) for name, value in declared.items()}
    except ValueError:
        found = dict(declared)
    layers, changed = layers_of(found)
    types = changed.get("layer_types", found.get("layer_types"))
    if way.kinds and "layer_types" in declared and len(set(types or ())) < 2 and len(named := kinds_named(kind)) > 1:
        changed["layer_types"] = [named[number % len(named)] for number in range(layers)]
    special = SPECIAL
    for name, made in found.items():
        value = declared[name] if isinstance(made, int) else made  # what it fills in itself is left to it
        if name in changed or isinstance(value, bool | str | float):
            continue
        if hasattr(value, "to_dict"):
            changed[name] = shrunk(type(value), kind, way)
        elif name in SPECIAL_IDS:
            changed[name] = SPECIAL_IDS[name]
        elif TOKEN.search(name) and "layer" not in name and value is not None:
            special -= 1
            changed[name] = special
        elif isinstance(value, int):
            changed[name] = layers if DEPTH.search(name) else tiny_number(name, value, found, way.scale)
        elif isinstance(value, list | tuple):
            if declared[name] is not None or any(isinstance(one, list) for one in value):
                changed[name] = shrunk_list(name, value, found)
        elif isinstance(value, dict) and "original_max" in str(value):  # of rotary embeddings
            changed[name] = tiny_positions(value)
        elif made is None and way.kinds and re.search(r"attn.*(indices|idxs)", name):
            changed[name] = [*range(1, layers, 2)]
        elif made is None and way.fills and "int" in str(config_class.__annotations__.get(name)):
            fitting = [most for pattern, most in SIZES[:-1] if re.search(pattern, name)]
            changed |= {name: fitting[0]} if fitting else {}
    if "is_decoder" in declared:
        changed["is_decoder"] = kind.can_generate()
    every = {name: one for name, one in way.demands.get("", {}).items() if isinstance(found.get(name), int)}
    config = config_class(**changed | every | way.demands.get(config_class.model_type, {}))
    if getattr(config, "rope_parameters", None) == {} and getattr(config, "layer_types", None):
        rotary = {"rope_type": "default", "rope_theta": 10000.0}  # published ones say it of each kind of layer
        config.rope_parameters = {one: dict(rotary) for one in config.layer_types}
    return config


def layers_of(found: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """How many layers there are, and what is told of each: some of each kind, or the first of each stretch."""
    types = found.get("layer_types") or found.get("layers_block_type")
    numbers = {name: value for name, value in found.items() if isinstance(value, int)}
    depth = len(types) if types else next((value for name, value in numbers.items() if DEPTH.search(name)), 0)
    lists = {
        name: value for name, value in found.items() if isinstance(value, list | tuple) and len(value) == depth > 0
    }
    stretches = {name: value for name, value in numbers.items() if STRETCH.search(name) and not DEPTH.search(name)}
    if len(stretches) > 1 and sum(stretches.values()) == depth:
        chosen = [end - value for end, value in zip(accumulate(stretches.values()), stretches.values(), strict=True)]
    elif lists:
        chosen, stretches = layers_of_each_kind(lists.values()), {}
    else:
        return LAYERS, {}
    told = {name: [shrunk_list(name, [value[one]], found)[0] for one in chosen] for name, value in lists.items()}
    return len(chosen), told | dict.fromkeys(stretches, 1)


def tiny_number(name: str, value: int, found: dict[str, Any], scale: int = 1) -> int:
    """What a number of this name becomes; heads keep to what they divide."""
    heads = {one: many for one, many in found.items() if re.search("heads$|n_head$", one) and isinstance(many, int)}
    if re.search(r"(kv|key_value|key)_heads|query_groups", name):
        others = [many for one, many in heads.items() if one != name]
        return 1 if value == 1 else 2 if others and value < max(others) else 4
    expand = next((many for one, many in found.items() if re.search(r"(^|_)expand$", one)), 1)
    if name in heads and ("mamba" in name or not any("attention" in one for one in heads)):
        return min(value, int(4 * expand))
    if name == "head_dim" and value == found.get("qk_rope_head_dim"):
        name = "qk_rope_head_dim"
    most = next(most for pattern, most in SIZES if re.search(pattern, name))
    return min(value, most * scale if most in WIDTHS else most)


def tiny_positions(given: dict) -> dict:
    """Rotary embeddings of any layers, made for texts shorter than the prompt."""
    return {
        name: tiny_positions(one) if isinstance(one, dict) else WINDOW if name.startswith("original_max") else one
        for name, one in given.items()
    }


def shrunk_list(name: str, items: Iterable, found: dict[str, Any]) -> list:
    """Small numbers in the place of those in a list; parts of the width stay parts of it."""
    items = list(items)
    width = found.get("hidden_size")
    if all(isinstance(one, int) for one in items) and sum(items) == width:
        return [one * 64 // width for one in items]
    shorter = {list: lambda one: shrunk_list(name, one, found), int: lambda one: tiny_number(name, one, found)}
    if any(isinstance(one, list) for one in items):  # such as [[names, times]]
        shorter[int] = lambda one: min(one, 2)
    return [shorter.get(type(one), lambda same: same)(one) for one in items]


def layers_of_each_kind(lists: Iterable[Sequence]) -> list[int]:
    """Numbers of layers: the first two of each kind, or the first where there are many."""
    seen: dict[tuple, list[int]] = {}
    for number, one in enumerate(zip(*lists, strict=True)):
        seen.setdefault(tuple(map(str, one)), []).append(number)
    each = 2 if len(seen) * 2 <= MOST_LAYERS else 1
    return sorted(number for numbers in list(seen.values())[:MOST_LAYERS] for number in numbers[:each])


def kinds_named(kind: "type[PreTrainedModel]") -> list[str]:
    """The kinds of layers that the code of a class and of its configuration speaks of."""
    from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES

    text = "".join(inspect.getsource(sys.modules[one.__module__]) for one in (kind, kind.config_class))
    return [one for one in ALLOWED_ATTN_LAYER_TYPES if f'"{one}"' in text]
