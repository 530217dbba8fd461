"""What a folder of divided weights says of itself: `accel-shards.json`.

version: of this layout. ranks: how many. plan: styles of transformers by the names of layers. versions: of the
libraries by which it was divided. tensors: by name, of the files that were divided: dtype and shape of the whole, and
how it is divided, null where every rank holds all of it. {"dim": 0, "spans": [[[0, 32]], [[32, 64]]]} gives rank 0 the
rows 0 to 31, rank 1 the others; what is not in one piece lies one behind another. Parts of a quantized weight are
divided as the weight is, whose rows and columns are counted. files: for each rank its files: name, bytes, and of every
tensor in it a CRC-32 of its bytes.
"""

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from accel.llm.ptq.formats.files import DTYPES
from accel.parallel.division import Division, TensorInfo
from accel.saved import read_json

MANIFEST = "accel-shards.json"
VERSION = 1
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class ShardFile:
    """name: in the folder. bytes: of the file. checksums: CRC-32 by tensor."""

    name: str
    bytes: int
    checksums: dict[str, int]


@dataclass(frozen=True)
class Manifest:
    """See the module. files: by rank."""

    ranks: int
    plan: dict[str, str]
    versions: dict[str, str]
    tensors: dict[str, tuple[TensorInfo, Division | None]]
    files: tuple[tuple[ShardFile, ...], ...]

    @property
    def digest(self) -> int:
        """Equal for ranks that read one manifest."""
        return zlib.crc32(json.dumps(self._told()).encode())

    def write(self, folder: Path) -> None:
        """All else is written before: a folder without it is not finished."""
        part = folder / f"{MANIFEST}.part"
        part.write_text(json.dumps(self._told()) + "\n")
        part.replace(folder / MANIFEST)

    def _told(self) -> dict[str, Any]:
        tensors = {
            name: {
                "dtype": DTYPE_NAMES[described.dtype],
                "shape": described.shape,
                "divided": None if division is None else division._asdict(),
            }
            for name, (described, division) in self.tensors.items()
        }
        files = [[asdict(file) for file in one] for one in self.files]
        told = {"version": VERSION, "ranks": self.ranks, "versions": self.versions, "plan": self.plan}
        return told | {"tensors": tensors, "files": files}


def is_divided(folder: Path) -> bool:
    """Whether weights divided among ranks lie there."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Raises ValueError, naming the file, where it is damaged or of a layout that is not known."""
    file = folder / MANIFEST
    told = read_json(file)
    if told.get("version") != VERSION:
        raise ValueError(f"{file} is of version {told.get('version')!r}; {VERSION} is read: divide the weights again")
    try:
        files = tuple(tuple(ShardFile(**file) for file in one) for one in told["files"])
        tensors = {name: _tensor(one) for name, one in told["tensors"].items()}
        found = Manifest(told["ranks"], dict(told["plan"]), dict(told["versions"]), tensors, files)
        fits = len(files) == found.ranks and all(
            division is None or len(division.spans) == found.ranks for _, division in tensors.values()
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from None
    if not fits:
        raise ValueError(f"{file} is damaged: it tells of another number of ranks than {found.ranks}")
    return found


def _tensor(told: dict[str, Any]) -> tuple[TensorInfo, Division | None]:
    described = TensorInfo(tuple(told["shape"]), DTYPES[told["dtype"]])
    if told["divided"] is None:
        return described, None
    spans = tuple(tuple((int(a), int(b)) for a, b in one) for one in told["divided"]["spans"])
    return described, Division(int(told["divided"]["dim"]), spans)


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a tensor's bytes, as they lie in a file."""
    return zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
