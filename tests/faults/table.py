"""The table of faults: one TOML file for a part of the product, one table in it for a fault.

[name]
file = "accel/..."   # of the product
old = '''...'''      # text that stands there exactly once
new = '''...'''      # what a careless or malicious change would make of it
tests = "tests/... -k ..."  # arguments of pytest: the few tests that are to see it
"""

import shlex
from dataclasses import dataclass
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, for which pytest brings this
    import tomli as tomllib

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Fault:
    """One wrong change of one place."""

    name: str
    file: str
    old: str
    new: str
    tests: str

    @property
    def part(self) -> str:
        """Of the product, as its tests' folders are called."""
        return self.file.replace("kernels/accel_kernels", "kernels").split("/")[1 if self.file[0] == "a" else 0]

    def gone(self, root: Path) -> str | None:
        """Why it cannot be applied in this tree."""
        file = root / self.file
        if not file.is_file():
            return f"{self.file} is not there"
        count = file.read_text().count(self.old)
        return None if count == 1 else f"its text stands {count} times in {self.file}"

    def lacking(self, root: Path) -> list[str]:
        """Tests that are named and not there: files, and functions behind `::`."""
        found = []
        for argument in shlex.split(self.tests):
            if argument.startswith("tests/"):
                path, _, name = argument.partition("::")
                text = (root / path).read_text() if (root / path).is_file() else ""
                if not (root / path).exists() or (name and f"def {name.partition('[')[0]}(" not in text):
                    found.append(argument)
        return found


def faults() -> dict[str, Fault]:
    """All, by name. Raises ValueError for a name in two files."""
    found: dict[str, Fault] = {}
    for path in sorted(HERE.glob("*.toml")):
        for name, said in tomllib.loads(path.read_text()).items():
            if name in found:
                raise ValueError(f"{path.name}: a fault {name!r} is in another file too")
            found[name] = Fault(name, **said)
    return found
