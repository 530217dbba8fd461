"""The files of one rank, opened: they are checked by their headers, and each tensor's bytes when it is read."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from accel.llm.ptq.formats.files import DTYPES, whole_file
from accel.llm.shards.manifest import MANIFEST, Manifest, checksum
from accel.parallel.division import Division, Span, spans_of


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

    def read(self, name: str) -> torch.Tensor:
        """This rank's part. Raises ValueError for bytes that are not those that were written."""
        path, opened, told = self.places[name]
        with whole_file(path):
            tensor = opened.get_tensor(name)
        if checksum(tensor) != told:
            raise ValueError(f"{path} is damaged: {name} is not what was written")
        return tensor

    def tensor(self, name: str) -> "PartOfTensor":
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
        part = self.files.read(self.name)
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
