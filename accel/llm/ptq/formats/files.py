"""What the files of a folder say before any weight is read: config.json, the index, the headers of safetensors."""

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig

from accel.errors import reason_of
from accel.libraries.loading import AutoQuantizationConfig
from accel.llm.ptq.formats.quantization_config import FIELD, typed_field
from accel.parallel.division import TensorInfo
from accel.quantization.activations import SCALE
from accel.quantization.formats import compressed_tensors as compressed
from accel.saved import first_line, read_json, readable

PARTS = (*compressed.NAMES, SCALE)  # of a quantized linear
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
# What `quantization_config` holds in the layouts of other libraries, and of what kind it is.
FIELDS: dict[str, type] = dict.fromkeys(("bits", "w_bit", "group_size", "q_group_size"), int)
FIELDS |= dict.fromkeys(("desc_act", "sym", "zero_point"), bool)


def read_config(folder: Path) -> tuple[PretrainedConfig, dict | None]:
    """The configuration and its `quantization_config`. Raises ValueError for what no library could read."""
    file = folder / "config.json"
    _check_fields(file, read_json(file).get(FIELD))
    with readable(folder):
        config = AutoConfig.from_pretrained(folder)
    quantization = getattr(config, FIELD, None)
    if quantization is None:
        return config, None
    _check_fields(file, quantization)
    if quantization.get("quant_method") != compressed.METHOD:
        try:
            AutoQuantizationConfig.from_dict(copy.deepcopy(quantization))
        except Exception as error:  # whatever classes of configurations raise for values of other kinds
            reason_of(error)
            raise ValueError(f"{file}: {FIELD} of {quantization.get('quant_method')}: {first_line(error)}") from error
    return config, quantization


def _check_fields(file: Path, quantization: Any) -> None:
    if quantization is None:
        return
    # bitsandbytes once wrote no method.
    named = isinstance(quantization, dict) and (
        quantization.get("load_in_8bit") or quantization.get("load_in_4bit") or quantization.get("quant_method")
    )
    if not named or not isinstance(quantization.get("quant_method", ""), str):
        raise ValueError(f"{file}: {FIELD} is {quantization!r}, not an object with a text as quant_method")
    for name, kind in FIELDS.items():
        typed_field(quantization, name, kind, f"{file}: {FIELD}", None)


@contextmanager
def located(*places: object) -> Iterator[None]:
    """Inside, a ValueError says where."""
    try:
        yield
    except ValueError as error:
        raise ValueError(": ".join(map(str, (*places, error)))) from None


def quantized_linears(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """By path, the parts of every quantized linear, as the files' headers tell: tensors without memory, but shapes."""
    with ExitStack() as files:
        return linears_among(opened(folder, files))


def opened(folder: Path, files: ExitStack) -> dict[str, Any]:
    """The files of weights, each by the names of the tensors that it holds, closed with files.

    Raises ValueError, naming it, for one that is missing, damaged, or lacks what the index says it holds.
    """
    found: dict[str, Any] = {}
    for path, expected in weight_files(folder).items():
        with whole_file(path):
            file = files.enter_context(safe_open(path, framework="pt"))
            names = set(file.keys())
        found |= dict.fromkeys(sorted(names), file)
        if lacking := expected - names:
            raise ValueError(f"{path} lacks {min(lacking)}, which the index says it holds")
    return found


@contextmanager
def whole_file(path: Path) -> Iterator[None]:
    """Inside, an error of safetensors is a ValueError that names the file."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged: {str(error).splitlines()[0]}") from None


def linears_among(files: Mapping[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """The same of files that are open, by the names of their tensors. A weight alone is none of a quantized linear."""
    linears: dict[str, dict[str, torch.Tensor]] = {}
    for name, file in files.items():
        path, _, part = name.rpartition(".")
        if part in PARTS:
            linears.setdefault(path, {})[part] = _without_memory(file, name)
    return {path: parts for path, parts in linears.items() if parts.keys() - {"weight", SCALE}}


def header_of(file: Any, name: str) -> TensorInfo:
    """Shape and dtype of a tensor in an open file. Raises ValueError for a dtype that is not read."""
    header = file.get_slice(name)
    if header.get_dtype() not in DTYPES:
        raise ValueError(f"{name} is of dtype {header.get_dtype()}, which is not read")
    return TensorInfo(tuple(header.get_shape()), DTYPES[header.get_dtype()])


def own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory of its own: files hold no tensor twice, nor a part of another's memory."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _without_memory(file: Any, name: str) -> torch.Tensor:
    if name.endswith(".weight_shape"):
        return file.get_tensor(name)
    shape, dtype = header_of(file, name)
    return torch.empty(shape, dtype=dtype, device="meta")


def weight_files(folder: Path) -> dict[Path, set[str]]:
    """The files of weights, with the names that the index says they hold."""
    if (folder / INDEX).is_file():
        try:
            places = json.loads((folder / INDEX).read_text())["weight_map"]
            files: dict[Path, set[str]] = {}
            for name, file in places.items():
                files.setdefault(folder / file, set()).add(name)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(f"{folder / INDEX} is damaged") from None
    else:
        files = {folder / WEIGHTS: set()}
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is missing")
    return files
