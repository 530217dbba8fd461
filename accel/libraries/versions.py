"""Which versions of the libraries accel was tested with, and which are installed."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

# By package: the oldest and the newest that the tests have passed on.
TESTED = {
    "torch": ("2.10", "2.15"),
    "triton": ("3.6", "3.9"),
    "transformers": ("5.17", "5.24"),
    "diffusers": ("0.41", "0.42"),
}


@cache  # every report and every `optimize` asks, and each answer reads a file
def installed(package: str) -> str | None:
    """The version, such as "2.13.0+cpu"; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def can_serve() -> bool:
    """Whether the packages of transformers' server are installed."""
    from transformers.utils.import_utils import is_serve_available

    return is_serve_available()


def newer_than_tested() -> list[str]:
    """A sentence for each library that is newer than the newest that was tested."""
    found = {package: installed(package) for package in TESTED}
    return [
        f"{package} {now} is newer than {TESTED[package][1]}, the newest that accel was tested with"
        for package, now in found.items()
        if now is not None and _numbers(now) > _numbers(TESTED[package][1])
    ]


def _numbers(text: str) -> tuple[int, int]:
    """Its first two numbers."""
    parts = [int(part) if part.isdigit() else 0 for part in text.split("+")[0].split(".")[:2]]
    return parts[0], parts[1] if len(parts) > 1 else 0
