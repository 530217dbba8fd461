"""A saved language model divided into files for ranks, a layer at a time: the whole of it is never in memory."""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accel_kernels.gemm.quantized_weight import PER_WORD, Quantized
from safetensors.torch import save_file
from transformers import PretrainedConfig

from accel.llm.ptq.formats.files import header_of, linears_among, located, opened, own_memory, read_config
from accel.llm.ptq.formats.loading import is_compressed_tensors, read_quantization
from accel.llm.ptq.formats.quantization_config import FIELD
from accel.llm.shards.manifest import Manifest, ShardFile, checksum, is_divided
from accel.parallel.division import Divided, Division, Span, TensorInfo, divided_among, taken
from accel.parallel.sharded_layers import OUTPUTS
from accel.quantization.activations import SCALE
from accel.quantization.formats import compressed_tensors as compressed
from accel.saved import refuse_pickles

LIBRARIES = ("torch", "transformers")
ENDS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
LAYER = re.compile(r".*?\.\d+(?=\.)")  # up to the first number, which is that of a layer
Weights = Mapping[str, Any]  # by the name of a tensor the file that holds it


def divide(folder: Path, out: Path, ranks: int, at: Callable[[int, int], None] = lambda done, whole: None) -> Manifest:
    """Writes each rank's part of the weights in folder to files in out, with the other files of the folder.

    at: told how many files are done, and of how many. A tensor is read when it is written, and a rank's part of one
    layer is in memory at a time. Raises ValueError, before anything is written, where out is not empty, the weights are
    damaged or not those of the model, or cannot be divided so.
    """
    if ranks < 2:
        raise ValueError(f"weights are divided among 2 ranks or more, not {ranks}")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json")
    if is_divided(folder):
        raise ValueError(f"{folder} holds weights that are divided already; divide the folder they come from")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not an empty folder")
    refuse_pickles(folder)
    config, told = read_config(folder)
    if told is not None and not is_compressed_tensors(told):
        raise ValueError(f"{folder} is quantized by {told.get('quant_method')}; {compressed.METHOD} is divided")
    with ExitStack() as files:
        weights = opened(folder, files)
        tensors = {name: header_of(file, name) for name, file in weights.items()}
        linears = linears_among(weights) if told is not None else {}
        if told is not None:
            read_quantization(folder, told, linears)
        with located(folder):
            found = _divided(config, tensors, linears, ranks)
        out.mkdir(parents=True, exist_ok=True)
        shards = _written(weights, linears, found, out, ranks, at)
    for path in sorted(folder.iterdir()):  # configurations and the tokenizer: all that hold no weights
        if path.is_file() and not path.name.endswith(ENDS):
            shutil.copyfile(path, out / path.name)
    entries = {name: (one, found.tensors[name]) for name, one in tensors.items()}
    manifest = Manifest(ranks, found.plan, {name: version(name) for name in LIBRARIES}, entries, shards)
    manifest.write(out)
    return manifest


def _divided(
    config: PretrainedConfig, tensors: Mapping[str, TensorInfo], linears: Mapping[str, Mapping], ranks: int
) -> Divided:
    """How every tensor is divided: parts of a quantized weight as the weight would be."""
    if FIELD in vars(config):
        del config.quantization_config
    parts = {f"{path}.{part}": path for path, held in linears.items() for part in held}
    asked = {name: one for name, one in tensors.items() if name not in parts}
    for path, held in linears.items():
        asked[f"{path}.weight"] = TensorInfo(compressed.read(held).shape, torch.float32)
    found = divided_among(config, asked, ranks)
    for path, held in linears.items():
        division = found.tensors.pop(f"{path}.weight")
        if division is not None:
            check_divisible(path, held, division)
        found.tensors.update({f"{path}.{part}": division for part in held})
    return found


def _written(
    weights: Weights,
    linears: Mapping[str, Mapping],
    found: Divided,
    out: Path,
    ranks: int,
    at: Callable[[int, int], None],
) -> tuple[tuple[ShardFile, ...], ...]:
    """For each rank and layer a file, whose name tells both."""
    groups = list(_groups(weights))
    shards: list[list[ShardFile]] = [[] for _ in range(ranks)]
    for number, names in enumerate(groups):
        for rank, files in enumerate(shards):
            name = f"rank-{rank:03d}-of-{ranks:03d}-{number:05d}.safetensors"
            tensors = dict(_part(weights, linears, found.tensors, names, rank))
            save_file(tensors, out / name, metadata={"format": "pt"})
            checksums = {one: checksum(tensor) for one, tensor in tensors.items()}
            files.append(ShardFile(name, (out / name).stat().st_size, checksums))
            del tensors
            at(number * ranks + rank + 1, len(groups) * ranks)
    return tuple(map(tuple, shards))


def _groups(names: Mapping[str, Any]) -> Iterator[list[str]]:
    """The names of each layer's tensors; of what is outside the layers, those of each module."""
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = LAYER.match(name)
        groups.setdefault(layer[0] if layer else name.rpartition(".")[0], []).append(name)
    yield from groups.values()


def _part(
    weights: Weights,
    linears: Mapping[str, Mapping],
    divisions: Mapping[str, Division | None],
    names: list[str],
    rank: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    quantized = {
        path: linears[path] for path in dict.fromkeys(name.rpartition(".")[0] for name in names) if path in linears
    }
    apart = {f"{path}.{part}" for path, held in quantized.items() for part in held}
    for name in names:
        if name not in apart:
            yield name, own_memory(taken(weights[name].get_slice(name), divisions[name], rank))
    for path, held in quantized.items():
        whole = {part: weights[f"{path}.{part}"].get_tensor(f"{path}.{part}") for part in held}
        for part, tensor in rank_part(whole, divisions[f"{path}.{next(iter(held))}"], rank).items():
            yield f"{path}.{part}", own_memory(tensor)


def check_divisible(path: str, parts: Mapping[str, torch.Tensor], division: Division) -> None:
    """Raises ValueError for a weight that cannot be so divided, naming it. parts: as the files' headers tell."""
    weight = compressed.read(parts)
    if compressed.GROUP_OF in parts:
        raise ValueError(f"{path}: columns in an order of their own (actorder 'group') are not divided among ranks")
    if division.dim == OUTPUTS:
        return
    columns, groups, ranks = weight.shape[1], weight.scales.shape[1], len(division.spans)
    for rank, spans in enumerate(division.spans):
        for edge in {edge for span in spans for edge in span if edge < columns}:
            if groups > 1 and edge % weight.group:
                raise ValueError(
                    f"{path}: {ranks} ranks would cut a group of {weight.group} inputs: of {columns} inputs in "
                    f"{groups} groups rank {rank} is to have {_ranges(spans)}; quantize with groups that divide "
                    f"{columns // ranks}"
                )
            if edge % PER_WORD:
                raise ValueError(
                    f"{path}: of {columns} inputs rank {rank} is to have {_ranges(spans)}, not a multiple of {PER_WORD}"
                )
        if not sum(stop - start for start, stop in spans):
            raise ValueError(f"{path}: {columns} inputs are too few for {ranks} ranks: none are left for rank {rank}")


def rank_part(held: Mapping[str, torch.Tensor], division: Division | None, rank: int) -> dict[str, torch.Tensor]:
    """What the rank's file is to hold of a linear. held: its parts in whole."""
    if division is None:
        return dict(held)
    data, scales, zeros, stored, _ = compressed.read(held)
    by_scale: Division | None
    if division.dim == OUTPUTS:
        by_number, by_scale = division, division
    else:
        by_number, columns = _counted(division, stored.columns), data.shape[1] * stored.columns
        by_scale = _counted(division, columns // scales.shape[1]) if scales.shape[1] > 1 else None
    mine = Quantized(
        taken(data, by_number, rank),
        taken(scales, by_scale, rank),
        None if zeros is None else taken(zeros, by_scale, rank),
        stored,
    )
    packed = "weight_packed" in held
    found = compressed.parts(mine, compressed.PACKED if packed else compressed.BYTEWISE)
    if not packed and mine.zeros is not None:
        found["weight_zero_point"] = mine.zeros
    return found | {name: held[name] for name in (SCALE,) if name in held}


def _counted(division: Division, size: int) -> Division:
    """The same where so many columns are one."""
    spans = tuple(tuple((start // size, -(-stop // size)) for start, stop in one) for one in division.spans)
    return Division(division.dim, spans)


def _ranges(spans: tuple[Span, ...]) -> str:
    return " and ".join(f"{start} to {stop - 1}" for start, stop in spans)
