"""A run that quantizes a model layer by layer, on disk: what is done stays done when it is interrupted."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from accel_kernels import Quantized
from accel_kernels.gemm.quantized_weight import PARTS
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from accel.libraries.loading import VOLATILE
from accel.llm.ptq.calibrate import LayerResult
from accel.llm.ptq.formats.files import own_memory

FOLDER, RUN, PART = "unfinished", "run.json", ".part"
SAMPLE = 4096  # values of each weight that tell one model from another


class Checkpoint:
    """The folder `checkpoint` inside the one where the model is to be saved: a file for each layer, and what run it is.

    Files are written beside and then renamed: a layer is there as a whole or not at all. Raises ValueError where out
    holds something else, or another run, naming the first difference.
    """

    def __init__(self, out: Path, run: dict[str, str | None]):
        self.out, self.folder = out, out / FOLDER
        if out.exists() and not out.is_dir():
            raise ValueError(f"{out} is a file, not a folder")
        if self.folder.is_dir() and (self.folder / RUN).is_file():
            _same(self.folder / RUN, run)
        elif any(map(self._foreign, out.rglob("*"))):
            raise ValueError(f"{out} is not empty and holds no interrupted run; give another folder, or empty it")
        self.run = run

    def _foreign(self, path: Path) -> bool:
        """Whether it is more than a run leaves behind that was killed as it began."""
        return path != self.folder / (RUN + PART) and (path != self.folder or not path.is_dir())

    def known(self) -> dict[str, LayerResult]:
        """The layers that are done, on the CPU. Raises ValueError for a damaged file, naming it."""
        return {result.path: result for result in map(_read, sorted(self.folder.glob("*.safetensors")))}

    def add(self, result: LayerResult) -> None:
        """Writes a layer; with the first, what run it is."""
        if not (self.folder / RUN).is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            _replace(self.folder / RUN, lambda path: path.write_text(json.dumps(self.run, indent=2)))
        fields = (
            (f"weights/{path}/{field}", tensor)
            for path, weight in result.weights.items()
            for field, tensor in weight.parts().items()
        )
        tensors = dict(fields) | {f"changed/{path}": tensor for path, tensor in result.changed.items()}
        tensors |= {f"inputs/{path}": tensor for path, tensor in result.inputs.items()}
        tensors = {name: own_memory(tensor.detach().cpu()) for name, tensor in tensors.items() if tensor is not None}
        path = self.folder / f"{result.path or 'model'}.safetensors"
        _replace(path, lambda part: save_file(tensors, part, metadata={"path": result.path}))

    def finish(self) -> None:
        """The model is saved."""
        if self.folder.is_dir():
            shutil.rmtree(self.folder)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    part = path.with_name(path.name + PART)
    try:
        write(part)
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except Exception:  # a full disk needs the room
        part.unlink(missing_ok=True)
        raise


def _read(file: Path) -> LayerResult:
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        line = str(error).split("\n")[0]
        raise ValueError(f"{file} is damaged ({line}); delete it, and its layer is quantized again") from None
    weights: dict[str, dict] = {}
    others: dict[str, dict[str, torch.Tensor]] = {"changed": {}, "inputs": {}}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        if kind == "weights":
            path, _, field = rest.rpartition("/")
            weights.setdefault(path, {})[field] = tensor
        else:
            others.setdefault(kind, {})[rest] = tensor
    if any({"data", "scales"} - fields.keys() or fields.keys() - set(PARTS) for fields in weights.values()):
        raise ValueError(f"{file} is no layer of a run; delete it, and its layer is quantized again")
    path = file.name.removesuffix(".safetensors")
    path = "" if path == "model" else path
    return LayerResult(path, {p: Quantized.of(**f) for p, f in weights.items()}, others["changed"], others["inputs"])


def _same(file: Path, run: dict[str, str | None]) -> None:
    try:
        before = json.loads(file.read_text())
        differing = [name for name in run if before.get(name) != run[name]]
    except (ValueError, AttributeError, RecursionError):
        raise ValueError(f"{file} is damaged; delete the folder {file.parent} to begin anew") from None
    if differing:
        name = differing[0]
        raise ValueError(
            f"{file.parent.parent} holds an interrupted run with another {name}: {before.get(name)}, now {run[name]}; "
            "give another folder, or delete this one to begin anew"
        )


def model_digest(model: PreTrainedModel) -> str:
    """Of the configuration, the names and shapes of all weights, and a sample of their values."""
    digest = hashlib.sha256()
    config = {name: value for name, value in model.config.to_dict().items() if name not in VOLATILE}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().flatten()
        digest.update(_bytes(flat[:: max(1, len(flat) // SAMPLE)]))
    return digest.hexdigest()[:16]


def data_digest(batches: Sequence[dict[str, torch.Tensor]]) -> str:
    """Of every token."""
    digest = hashlib.sha256()
    for batch in batches:
        for name, tensor in batch.items():
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(_bytes(tensor))
    return digest.hexdigest()[:16] if batches else "none"


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
