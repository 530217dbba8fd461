"""Entries in files that processes share: a cache never raises and never loses what others wrote.

Adding takes the file's lock, reads it again, and puts a whole new file in its place.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PATIENCE = 5.0  # seconds that a writer waits for others, who need milliseconds each


class CacheFile:
    """Entries by key in a JSON object, in a file that several processes and threads share.

    kind: of all values; an entry with another is damaged, and dropped.
    """

    def __init__(self, path: Path, kind: type = object):
        self.path, self.kind = path, kind

    def read(self) -> dict[str, Any]:
        """All entries; none where there is no file, it cannot be read, or it is damaged."""
        try:
            return self._entries()
        except OSError:
            return {}

    def add(self, entries: Mapping[str, Any]) -> bool:
        """Keeps these too, over those of the same keys. False where they cannot be written: the file is as before."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.with_name(self.path.name + ".lock")):
                known = self._entries()
                both = {**known, **entries}
                if known != both:
                    text = json.dumps(both, indent=1)
                    replace_file(self.path, lambda part: part.write_text(text, encoding="utf-8"))
        except OSError:
            return False
        return True

    def _entries(self) -> dict[str, Any]:
        """Raises OSError for a file that exists and cannot be read: it must not be overwritten."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError, RecursionError):  # none yet, or damaged: it is written again
            return {}
        found = found.items() if isinstance(found, dict) else ()
        return {key: value for key, value in found if isinstance(value, self.kind)}


def cache_folder() -> Path | None:
    """ACCEL_CACHE_DIR or ~/.cache/accel; None for a user who has no home."""
    folder = os.path.expanduser(os.environ.get("ACCEL_CACHE_DIR") or "~/.cache/accel")
    return None if folder.startswith("~") else Path(folder)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Lets write(part) write a file beside `path`, and puts it there whole. What raises leaves nothing behind."""
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        write(part)
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Holds the lock. The system lets go of the lock of a process that dies. Raises OSError where others hold
    it for too long. Where a system or its files have no locks, two that write at once may lose an entry.
    """
    end = time.monotonic() + PATIENCE
    while True:
        file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            while not _lock(file):
                if time.monotonic() > end:
                    raise TimeoutError(f"{lock} is held by another process")
                time.sleep(0.001)
            if not _is(file, lock):  # who had it has removed it: others lock another by now
                continue
            try:
                yield
            finally:
                with suppress(OSError):  # Windows removes no file that is open
                    lock.unlink()
            return
        finally:
            os.close(file)


def _lock(file: int) -> bool:
    """Whether an open file is locked now, or cannot be."""
    try:
        import fcntl
    except ImportError:
        return _lock_windows(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system that has no locks
        return True
    return True


def _lock_windows(file: int) -> bool:
    try:
        import msvcrt
    except ImportError:
        return True
    try:
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except PermissionError:
        return False
    return True


def _is(file: int, path: Path) -> bool:
    """Whether the open file is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
