"""Divided weights loaded: each rank reads its own files, and gets what transformers' own loading would give it."""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from accel.libraries.loading import among, entered
from accel.llm.ptq.formats.files import DTYPES, linears_among, located, read_config, whole_file
from accel.llm.ptq.formats.loading import (
    Parts,
    checked_weight,
    paths_in,
    quantized_linear_of,
    read_quantization,
    replace_linears,
)
from accel.llm.ptq.formats.quantization_config import QuantizationConfig
from accel.llm.ptq.formats.saving import SAVE, SaveOverride
from accel.llm.shards.manifest import MANIFEST, Manifest, checksum, read_manifest
from accel.parallel.agreement import require_agreement
from accel.parallel.division import Division, Span, spans_of
from accel.parallel.ranks import Ranks
from accel.parallel.sharded_layers import install_sharding
from accel.quantization.formats import compressed_tensors as compressed
from accel.quantization.patch import exchange
from accel.saved import check_keys, readable


class RankFiles:
    """Of a rank. Raises ValueError, naming it, for a file that is missing or damaged.

    They are closed with the object: threads of a loading that failed may read on for a moment.
    """

    def __init__(self, folder: Path, manifest: Manifest, rank: int):
        self.manifest, self.rank = manifest, rank
        self.places: dict[str, tuple[Path, Any, int]] = {}  # by name of a tensor: file, opened, checksum
        for told in manifest.files[rank]:
            path = folder / told.name
            if not path.is_file():
                raise ValueError(f"{path} is missing, of rank {rank} of {manifest.ranks}")
            if (size := path.stat().st_size) != told.bytes:
                raise ValueError(f"{path} is damaged: it has {size} bytes, and {told.bytes} in {MANIFEST}")
            with whole_file(path):
                opened = safe_open(path, framework="pt")
                names = set(opened.keys())
            if names != told.checksums.keys():
                name = min(names ^ told.checksums.keys())
                raise ValueError(f"{path} is damaged: {name} is in one of it and {MANIFEST}, and not in both")
            self.places |= {name: (path, opened, told.checksums[name]) for name in names}

    def shape(self, name: str) -> tuple[int, ...]:
        """Of this rank's part."""
        path, opened, _ = self.places[name]
        with whole_file(path):
            return tuple(opened.get_slice(name).get_shape())

    def get_tensor(self, name: str) -> torch.Tensor:
        """This rank's part. Raises ValueError for bytes that are not those that were written."""
        path, opened, told = self.places[name]
        with whole_file(path):
            tensor = opened.get_tensor(name)
        if checksum(tensor) != told:
            raise ValueError(f"{path} is damaged: {name} is not what was written")
        return tensor

    def get_slice(self, name: str) -> "PartOfTensor":
        """Of the whole tensor, as safetensors gives it."""
        return PartOfTensor(self, name)


class PartOfTensor:
    """Stands for a whole tensor, as safetensors does for one in a file, of which this rank's part can be read."""

    def __init__(self, files: RankFiles, name: str):
        self.files, self.name = files, name
        self.whole, self.division = files.manifest.tensors[name]

    def get_shape(self) -> list[int]:
        return list(self.whole.shape)

    def get_dtype(self) -> str:
        return next(code for code, dtype in DTYPES.items() if dtype == self.whole.dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Raises ValueError where another rank holds some of what is asked for."""
        asked = spans_of(index, self.whole.shape)
        spans = list(asked)
        if self.division is not None:
            dim = self.division.dim
            spans[dim] = self._found(spans[dim], self.division)
        part = self.files.get_tensor(self.name)
        return part[tuple(slice(*span) for span in spans)].contiguous()

    def _found(self, asked: Span, division: Division) -> Span:
        """Where what is asked for lies in what this rank holds."""
        start, stop = asked
        held = division.spans[self.files.rank]
        before = 0
        for first, last in held:
            if first <= start and stop <= last:
                return before + start - first, before + stop - first
            before += last - first
        if start == stop:
            return 0, 0
        versions = ", ".join(f"{name} {number}" for name, number in self.files.manifest.versions.items())
        raise ValueError(
            f"{self.name}: rank {self.files.rank} holds {list(map(list, held))} of dimension {division.dim}, and "
            f"is asked for {[start, stop]}: it was divided by {versions}; divide the weights again by those of here"
        )


T = TypeVar("T")
STEP = "accel.load"


def load(folder: Path, dtype: str | torch.dtype, device: str | torch.device | None) -> nn.Module:
    """As `accel.load`, of a folder that `accel shard` wrote; called by every rank.

    Raises ValueError where there are more ranks or fewer than it is divided among, and on all ranks where files of one
    are missing or damaged.
    """
    manifest = read_manifest(folder)
    rank = _own_rank(folder, manifest.ranks)
    if device is not None:
        raise ValueError(f"device={device!r}: {folder} is divided among ranks; each has the device of its number")
    opened = _together(manifest, lambda: RankFiles(folder, manifest, rank))
    return _together(manifest, lambda: _loaded(folder, manifest, opened, dtype))


def _own_rank(folder: Path, ranks: int) -> int:
    """This process's number. Raises ValueError where there are not so many."""
    if dist.is_available() and dist.is_initialized():
        size, rank = dist.get_world_size(), dist.get_rank()
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    else:
        raise ValueError(
            f"{folder} is divided among {ranks} ranks, and this is one process: start it by "
            f"torchrun --nproc-per-node {ranks}"
        )
    if size != ranks:
        raise ValueError(
            f"{folder} is divided among {ranks} ranks, and there are {size}: start {ranks}, or divide the weights "
            f"among {size} by accel shard --tp {size}"
        )
    return rank


def _together(manifest: Manifest, do: Callable[[], T]) -> T:
    """What it gives. Raises this rank's error, and in a group that of the rank that has one on the others."""
    found: list[T] = []
    wrong = None
    try:
        found.append(do())
    except ValueError as error:
        wrong = error
    if dist.is_initialized():
        told = {"what is wrong": None if wrong is None else str(wrong), MANIFEST: manifest.digest}
        try:
            require_agreement(Ranks.of(dist.group.WORLD), STEP, told)  # type: ignore[arg-type]
        except ValueError as error:
            raise (error if wrong is None else wrong) from None
    if wrong is not None:
        raise wrong
    return found[0]


def _loaded(folder: Path, manifest: Manifest, opened: RankFiles, dtype: str | torch.dtype) -> nn.Module:
    config, told = read_config(folder)
    if dtype == "auto":
        floating = (one.dtype for one, _ in manifest.tensors.values() if one.dtype.is_floating_point)
        dtype = config.dtype or next(floating)
    linears = _linears(opened) if told is not None else {}
    apart = {f"{path}.{part}" for path, parts in linears.items() for part in parts}
    given: dict[str, Any] = {
        "state_dict": {name: opened.get_slice(name) for name in manifest.tensors if name not in apart},
        "distributed_config": among(manifest.ranks),
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
        "dtype": dtype,
    }
    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config))
    with ExitStack() as stack:
        stack.enter_context(readable(folder))
        if linears:
            quantization = read_quantization(folder, told or {}, linears)
            finish = partial(_finish, quantization=quantization, linears=linears, opened=opened)
            method = stack.enter_context(
                entered(
                    partial(replace_linears, linears=linears, make=PlaceholderShard, quantization=quantization), finish
                )
            )
            config.quantization_config = {"quant_method": method}
        elif told is not None:
            del config.quantization_config
        model, found = kind.from_pretrained(None, config=config, **given)
    check_keys(folder, model, found)
    model.config.name_or_path = model.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _linears(opened: RankFiles) -> dict[str, dict[str, torch.Tensor]]:
    """By path the parts of every quantized linear in whole: tensors without memory, but shapes."""
    linears = linears_among(dict.fromkeys(opened.manifest.tensors, opened))
    for path, parts in linears.items():
        if "weight_shape" in parts:
            rows, words = parts["weight_packed"].shape
            mine = opened.shape(f"{path}.weight_packed")[1]
            columns = int(opened.get_tensor(f"{path}.weight_shape")[-1])
            parts["weight_shape"] = torch.tensor((rows, words * columns // mine), device="cpu")
    return linears


class PlaceholderShard(nn.Module):
    """Stands where a quantized linear will, while transformers divides and loads all else of a model."""

    def __init__(self, parts: Parts, bias: nn.Parameter | None):
        super().__init__()
        self.out_features, self.in_features = compressed.read(parts).shape
        self.register_parameter("bias", bias)


def _finish(
    model: PreTrainedModel, quantization: QuantizationConfig, linears: Mapping[str, Parts], opened: RankFiles
) -> None:
    pairs: list[tuple[nn.Module, nn.Linear]] = []
    places = paths_in(model, linears)
    for path, parts in linears.items():
        module = model.get_submodule(places[path])
        held = {part: opened.get_tensor(f"{path}.{part}").to(model.device) for part in parts}
        bias = module._parameters.pop("bias")
        with located(path):
            made = quantized_linear_of(
                model, places[path], module, quantization, checked_weight(held), bias, held, compressed.read(parts)
            )
        # Of the whole, as a linear that is divided says; transformers divides and joins by them.
        made.out_features, made.in_features = module.out_features, module.in_features
        install_sharding(module, made)
        pairs.append((module, made))
    exchange(model, pairs)
    vars(model)[SAVE] = SaveOverride(model)
