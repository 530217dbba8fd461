"""The linears and experts of a language model quantized, where it still runs with them."""

from collections.abc import Callable

import torch
from accel_kernels.device import Feature, lacks
from torch import nn
from transformers import PreTrainedModel

from accel.errors import reason_of
from accel.libraries.adapters import BASE
from accel.llm.moe.experts import ExpertFormula, holds_experts
from accel.llm.parts.linear import holds_transposed
from accel.llm.ptq.calibration.linears import heads, linears
from accel.llm.ptq.formats.saving import guard
from accel.llm.recording.inputs import example_ids
from accel.llm.recording.record import NotUnderstood
from accel.llm.recording.recorder import decoder_layers
from accel.llm.recording.resting import Unwritten, model_side_effects, resting
from accel.options import Options
from accel.parallel.sharded_layers import expert_sharding, local
from accel.patching.structure import meta_weights, tampered, twin
from accel.quantization import model as quantization
from accel.quantization.experts import OWN, ExpertStacks, QuantizedExperts
from accel.quantization.linears import Dense, base_modules
from accel.quantization.module import dequantizing
from accel.quantization.scheme import Scheme

ADAPTED = "an adapter is put around its stacks"
Find = Callable[[nn.Module], ExpertFormula | str]


def experts(model: PreTrainedModel, scheme: Scheme, find: Find) -> tuple[dict[str, ExpertStacks], dict[str, str]]:
    """By path: the experts inside the decoder layers to be quantized, and the reason why others are not.

    find: by what a module of experts computes, or why that is not known. Only experts that run fast are quantized:
    stock code would write all of them out in every call.
    """
    try:
        path, _ = decoder_layers(model)
    except NotUnderstood:
        path = ""
    chosen: dict[str, ExpertStacks] = {}
    skipped: dict[str, str] = {}
    for where, module in base_modules(model.get_submodule(path), path, set()):
        if not holds_experts(module):
            continue
        found = _refuses(where, module) or _unread(next(module.parameters()).device, scheme) or find(_whole(module))
        if isinstance(found, ExpertFormula) and found.idle:
            found = "some of its experts have no matrices of their own"
        if isinstance(found, ExpertFormula):
            stacks = ExpertStacks(module, found.stacks, found.transposed)
            refused = [f"{name}: {why}" for name in stacks.names if (why := scheme.refuses(stacks.inputs(name)))]
            if not refused:
                chosen[where] = stacks
                continue
            found = refused[0]
        skipped[where] = found
    return chosen, skipped


def _whole(module: nn.Module) -> nn.Module:
    """The module, or one of what this rank has of it."""
    return module if expert_sharding(module) is None else twin(module, local)


def _unread(device: torch.device, scheme: Scheme) -> str | None:
    """Why no kernel reads such numbers on this device."""
    reason = lacks(device, Feature.FLOAT8) if scheme.weight_dtype == "fp8" else None
    return reason and f"{reason}: no kernel reads it"


def _refuses(path: str, module: nn.Module) -> str | None:
    """Why a module of experts is left alone, whatever it computes."""
    if isinstance(module, QuantizedExperts):
        return f"is {module.scheme} already"
    if path.rpartition(".")[2] == BASE:
        return ADAPTED
    parts = expert_sharding(module)
    if parts is not None and parts.style is None:
        return "whole experts are divided among ranks: their stacks keep their dtype"
    if parts is None and (reason := tampered(module)):
        return reason
    own = module if parts is None else twin(module, local)
    held = [parameter for parameter in own._parameters.values() if parameter is not None]
    if meta_weights(module) or not all(type(one) is nn.Parameter and one.is_floating_point() for one in held):
        return "its stacks are not loaded, or of a type of their own"
    taken = [name for name in OWN if hasattr(module, name)]
    return f"it has an attribute {taken[0]} of its own" if taken else None


TOKENS = 3


class LanguageModelQuantization(quantization.Quantization):
    """Of the linears and experts inside the decoder layers, and of the output head where the options name it; the model
    is then saved in the layout of compressed-tensors.

    find: see `experts`; stacks: see `linears`. routers: paths of linears that choose experts, which keep their dtype.
    tried: the model is called then, and left as it was where it does not run any more: some write into their weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        weights: str,
        options: Options,
        find: Find,
        tried: bool = False,
        routers: frozenset[str] = frozenset(),
        stacks: tuple[str, ...] = (),
    ):
        self.tried = model if tried else None
        self.head_scheme = Scheme.of_head(weights)
        self.heads, left = heads(model, self.head_scheme)
        chosen, skipped = linears(model, Scheme.parse(weights), stacks)
        skipped |= dict.fromkeys(routers & chosen.keys(), "it chooses experts")
        chosen = {path: module for path, module in chosen.items() if path not in routers}
        mixtures, others = experts(model, Scheme.parse(weights), find)
        skipped = {path: reason for path, reason in (skipped | others | left).items() if path not in mixtures}
        super().__init__(model, weights, options, chosen | self.heads, skipped, guard(model), mixtures)

    def run(self) -> None:
        super().run()
        reason = None if self.tried is None or not self.modules else _failure(self.tried)
        if reason is not None:
            self.swap.drop()
            self.records.clear()
            self.rows = [row for row in self.rows if row[1] == "skipped"]
            left = dict.fromkeys(self.modules, f"the model does not run with quantized linears: {reason}")
            self.skip(left)
            self.warn(left)

    def scheme_of(self, path: str) -> Scheme:
        return self.scheme if self.head_scheme is None or path not in self.heads else self.head_scheme

    def transposed(self, module: Dense) -> bool:
        return holds_transposed(module)


def _failure(model: PreTrainedModel) -> str | None:
    """The error of calling the model on a few tokens; None where there is none, or calling it would be noticed."""
    if model_side_effects(model) is not None:
        return None
    try:
        with resting(model), Unwritten(model), dequantizing(model):
            type(model).forward(model, input_ids=example_ids(model, TOKENS))
    except Exception as error:  # whatever a forward may raise
        return reason_of(error)
    return None
