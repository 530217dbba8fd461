"""The parts of a quantized weight, divided among ranks as the weight itself would be."""

from collections.abc import Mapping

import torch
from accel_kernels.gemm.quantized_weight import PER_WORD, Quantized

from accel.llm.ptq.formats import compressed_tensors as compressed
from accel.parallel.division import Division, Span, taken
from accel.parallel.sharded_layers import OUTPUTS
from accel.quantization.activations import SCALE


def check(path: str, parts: Mapping[str, torch.Tensor], division: Division) -> None:
    """Raises ValueError for a weight that cannot be so divided, naming it. parts: as the files' headers tell."""
    weight = compressed.read(parts)
    if compressed.ORDER in parts:
        raise ValueError(f"{path}: columns in an order of their own (actorder 'group') are not divided among ranks")
    if division.dim == OUTPUTS:
        return
    columns, groups, ranks = weight.shape[1], weight.scales.shape[1], len(division.spans)
    for rank, spans in enumerate(division.spans):
        for edge in {edge for span in spans for edge in span if edge < columns}:
            if groups > 1 and edge % weight.group:
                raise ValueError(
                    f"{path}: {ranks} ranks would cut a group of {weight.group} inputs: of {columns} inputs in "
                    f"{groups} groups rank {rank} is to have {_told(spans)}; quantize with groups that divide "
                    f"{columns // ranks}"
                )
            if edge % PER_WORD:
                raise ValueError(
                    f"{path}: of {columns} inputs rank {rank} is to have {_told(spans)}, not a multiple of {PER_WORD}"
                )
        if not sum(stop - start for start, stop in spans):
            raise ValueError(f"{path}: {columns} inputs are too few for {ranks} ranks: none are left for rank {rank}")


def rank_part(held: Mapping[str, torch.Tensor], division: Division | None, rank: int) -> dict[str, torch.Tensor]:
    """What the rank's file is to hold of a linear. held: its parts in whole."""
    if division is None:
        return dict(held)
    data, scales, zeros = compressed.read(held)
    by_scale: Division | None
    if division.dim == OUTPUTS:
        by_number, by_scale = division, division
    else:
        by_number = _counted(division, _per(data))
        by_scale = _counted(division, data.shape[1] * _per(data) // scales.shape[1]) if scales.shape[1] > 1 else None
    mine = Quantized(
        taken(data, by_number, rank),
        taken(scales, by_scale, rank),
        None if zeros is None else taken(zeros, by_scale, rank),
    )
    packed = "weight_packed" in held
    found = compressed.parts(mine, compressed.PACKED if packed else compressed.BYTEWISE)
    if not packed and mine.zeros is not None:
        found["weight_zero_point"] = mine.zeros
    return found | {name: held[name] for name in (SCALE,) if name in held}


def _per(data: torch.Tensor) -> int:
    """Numbers in an element."""
    return PER_WORD if data.dtype == torch.int32 else 1


def _counted(division: Division, size: int) -> Division:
    """The same where so many columns are one."""
    spans = tuple(tuple((start // size, -(-stop // size)) for start, stop in one) for one in division.spans)
    return Division(division.dim, spans)


def _told(spans: tuple[Span, ...]) -> str:
    return " and ".join(f"{start} to {stop - 1}" for start, stop in spans)
