"""Experts that came in MXFP4 and were written out, as transformers does without its kernels: packed again, exactly."""

from functools import partial

import torch
from accel_kernels.gemm.quantized_weight import MX_GROUP, MXFP4, Quantized, mxfp4_weight
from torch import nn
from transformers import PreTrainedModel

from accel.llm.moe.experts import ExpertFormula
from accel.llm.ptq.formats.saving import guard
from accel.llm.ptq.model import Find, experts
from accel.parallel.sharded_layers import expert_sharding
from accel.patching.rule import set_data
from accel.quantization.experts import ExpertStacks, QuantizedExperts
from accel.quantization.patch import QuantizedModulePatch, exchange, held_elsewhere
from accel.quantization.scheme import Scheme

SCHEME = Scheme(MXFP4.name, MX_GROUP)
SAMPLE = 64  # rows of a stack by which others are told from MXFP4's
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number


class Mxfp4Experts(QuantizedModulePatch):
    """A patch: (plain, packed) experts of one model. Plain weights are freed, and written again by `undo`, bit for bit.

    found: by path, those whose weights begin as MXFP4's do. As it is applied each is read in full, and stays plain
    where one number is another. rows: (path, status, reason) of these.
    """

    def __init__(self, model: PreTrainedModel, find: Find):
        super().__init__(model, True, guard(model))
        self.found, _ = experts(model, SCHEME, partial(_formula, find))
        self.rows: list[tuple[str, str, str]] = []

    def apply(self) -> None:
        if self.there or not self.found:
            return
        self.there, self.rows = True, []
        self.shared = held_elsewhere(self.root, [stacks.module for stacks in self.found.values()])
        try:
            with torch.inference_mode(False), torch.no_grad():
                for path, stacks in self.found.items():
                    self.rows.append((path, *self._pack(stacks)))
            self.guard = self.guard if self.pairs else None
            if self.guard is not None:
                self.guard.apply()
        except BaseException:
            self.undo()
            raise

    def _pack(self, stacks: ExpertStacks) -> tuple[str, str]:
        module, packed = stacks.module, {}
        for name in stacks.names:
            found = packed_exactly(stacks.matrices(name))
            if found is None:
                return "skipped", f"{name}: some of its numbers are not those of MXFP4"
            packed[name] = found
        new, before = QuantizedExperts(stacks, packed, SCHEME), sum(module.get_parameter(one).nbytes for one in packed)
        exchange(self.root, [(module, new)])
        self.pairs.append((module, new))
        for name in packed:
            weight = module.get_parameter(name)
            if id(weight) not in self.shared and not weight.is_inference():
                set_data(weight, lambda data: data.new_empty((0, *data.shape[1:])))
        after = sum(one.nbytes for one in packed.values())
        return "patched", f"{SCHEME}, bit for bit: {before / 1e6:,.2f} MB in {after / 1e6:,.2f}"

    def undo(self) -> None:
        if not self.there:
            return
        if self.guard is not None:
            self.guard.undo()
        with torch.inference_mode(False), torch.no_grad():
            while self.pairs:
                module, new = self.pairs[-1]
                for name in new.formats:
                    weight, packed = module.get_parameter(name), new.stack(name)
                    if not weight.numel():
                        whole = new.written(name, packed, weight.dtype).to(new.dtype).contiguous()
                        set_data(weight, lambda data, whole=whole: whole)
                    elif (weight.device, weight.dtype) != (packed.data.device, new.dtype):
                        set_data(weight, lambda data, to=(packed.data.device, new.dtype): data.to(*to))
                vars(module).update(new.settings())
                exchange(self.root, [(new, module)])
                self.pairs.pop()
        self.there = False


def _formula(find: Find, module: nn.Module) -> ExpertFormula | str:
    """What experts compute whose weights may have come from MXFP4, or why they stay as they are."""
    if expert_sharding(module) is not None or module.training:
        return "they are divided among ranks, or in training"
    for stack in (one for one in module.parameters(recurse=False) if one.dim() == 3):
        rows = [one[:, :SAMPLE] for one in (stack[:1], stack[:1].transpose(1, 2))]
        if not stack.is_contiguous() or not any(map(_begins, rows)):
            return "their numbers are not those of MXFP4"
    return find(module)


def _begins(rows: torch.Tensor) -> bool:
    held = bool(rows.any()) and not rows.shape[2] % MX_GROUP
    return held and packed_exactly(rows) is not None


def packed_exactly(stack: torch.Tensor) -> Quantized | None:
    """(E, N, K), in any strides, as rows (E N, K) of MXFP4; None where they would not be the same bits."""
    parts, same = [], []
    for matrix in stack.detach():
        parts.append(mxfp4_weight(matrix))
        bits = (one.contiguous().view(BITS[one.itemsize]) for one in (matrix, parts[-1].dequantized(matrix.dtype)))
        same.append(torch.eq(*bits).all())
    if not bool(torch.stack(same).all()):
        return None
    scales = torch.cat([one.scales.view(torch.uint8) for one in parts]).view(torch.float8_e8m0fnu)
    return Quantized(torch.cat([one.data for one in parts]), scales, None, MXFP4)
