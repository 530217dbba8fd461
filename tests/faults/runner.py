"""Breaks a copy of the tree in one place, runs the tests that are to see it, and puts the place back."""

import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import NamedTuple

from .table import HERE, ROOT, Fault

CAUGHT, MISSED, GONE, UNCLEAR = "caught", "not caught", "place gone", "unclear"
SECONDS = 900  # of the tests of one fault: what hangs is seen too
ENDS = {0: MISSED, 1: CAUGHT}  # of pytest; all others are of tests that were not found, or could not be collected
SUMMARY = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
PYTEST = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist")


class Outcome(NamedTuple):
    """verdict: one of the four above. by: the first test that fails, or why there is no verdict."""

    verdict: str
    by: str
    seconds: float


class Tree:
    """A copy of all files that git knows or would take, as they are now, and the process that runs tests in it."""

    def __enter__(self) -> "Tree":
        self.folder = TemporaryDirectory(prefix="faults-")
        self.root = Path(self.folder.name) / "tree"
        self.server: subprocess.Popen | None = None
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode()
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():  # else it was deleted
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        self.folder.cleanup()

    def stop(self) -> None:
        """Ends the process, with all that it runs."""
        if self.server is not None:
            os.killpg(self.server.pid, signal.SIGKILL)
            self.server.wait()
            self.server = None

    def run(self, fault: Fault, broken: bool = True) -> Outcome:
        """broken: else the tests run on the tree as it is, to see that they pass."""
        reason = fault.gone(self.root)
        if reason is not None:
            return Outcome(GONE, reason, 0.0)
        file = self.root / fault.file
        text = file.read_text()
        start = time.perf_counter()
        if broken:
            _write(file, text.replace(fault.old, fault.new))
        try:
            verdict, by = self._tested(fault)
        finally:
            _write(file, text)
        return Outcome(verdict, by, round(time.perf_counter() - start, 1))

    def _tested(self, fault: Fault) -> tuple[str, str]:
        server, printed = self._started(), self.root.parent / "printed"
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps([[*PYTEST, *shlex.split(fault.tests)], str(printed)]) + "\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], SECONDS)[0]:
            self.stop()
            return CAUGHT, f"no end after {SECONDS} s"
        code = server.stdout.readline()
        verdict = ENDS.get(int(code or -1), UNCLEAR)
        text = printed.read_text(errors="replace") if printed.exists() else ""
        failed = SUMMARY.search(text)
        if failed is not None:
            return verdict, failed[1]
        return verdict, "" if verdict == MISSED else (text.strip().splitlines() or ["it ended"])[-1]

    def _started(self) -> subprocess.Popen:
        if self.server is None:
            paths = os.pathsep.join(map(str, (self.root, self.root / "kernels")))
            settings = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
            command, pipe = [sys.executable, str(HERE / "server.py")], subprocess.PIPE
            self.server = subprocess.Popen(
                command, cwd=self.root, env=os.environ | settings, stdin=pipe, stdout=pipe, text=True,
                start_new_session=True,
            )  # fmt: skip
        return self.server


def _write(file: Path, text: str) -> None:
    """Byte code goes by whole seconds and the size of the text, which a fault may leave as it is."""
    file.write_text(text)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()
