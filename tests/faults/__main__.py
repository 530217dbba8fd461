"""Breaks the product on purpose, and tells which of these faults the tests see. Works in a copy of the tree."""

import argparse
import fnmatch
import json
import platform
import queue
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .runner import CAUGHT, MISSED, Outcome, Tree
from .table import ROOT, Fault, faults

LIBRARIES = ("torch", "triton", "transformers", "diffusers", "pytest")


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", default=["*"], help="of faults, or patterns such as 'kv-*'; all without")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time, each in a tree of its own")
    parser.add_argument("--json", type=Path, help="a file in which results are added or renewed")
    parser.add_argument("--intact", action="store_true", help="break nothing: the named tests are to pass")
    given = parser.parse_args()
    known = faults()
    wanted = [one for name, one in known.items() if any(fnmatch.fnmatch(name, wish) for wish in given.names)]
    if not wanted:
        parser.error(f"no fault is called {' or '.join(given.names)}; there are {', '.join(known)}")
    console = Console()
    found = {}
    with ExitStack() as stack, ThreadPoolExecutor(given.jobs) as pool:
        trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for _ in range(given.jobs):
            trees.put(stack.enter_context(Tree()))

        def in_a_tree(fault: Fault) -> Outcome:
            tree = trees.get()
            try:
                return tree.run(fault, not given.intact)
            finally:
                trees.put(tree)

        for fault, outcome in zip(wanted, pool.map(in_a_tree, wanted), strict=True):
            found[fault.name] = outcome
            console.print(f"{fault.name}: {outcome.verdict} {outcome.by} ({outcome.seconds:.0f} s)", highlight=False)
            if given.json is not None:
                keep(given.json, {fault.name: outcome})
    console.print(shown(found))
    good = MISSED if given.intact else CAUGHT
    return int(any(outcome.verdict != good for outcome in found.values()))


def shown(found: dict[str, Outcome]) -> Table:
    caught = sum(outcome.verdict == CAUGHT for outcome in found.values())
    table = Table(title=f"{caught} of {len(found)} faults caught", title_justify="left")
    for heading in ("fault", "verdict", "seconds", "by"):
        table.add_column(heading, overflow="fold")
    for name, (verdict, by, seconds) in found.items():
        table.add_row(name, verdict, f"{seconds:.0f}", by, style=None if verdict == CAUGHT else "red")
    return table


def keep(file: Path, found: dict[str, Outcome]) -> None:
    """Adds results to those in the file, each with the commit that it is of, and the versions of now."""
    before = json.loads(file.read_text())["faults"] if file.exists() else {}
    command = ["git", "describe", "--always", "--exclude=*", "--dirty", "--abbrev=10"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    results = before | {name: outcome._asdict() | {"commit": commit} for name, outcome in found.items()}
    told = {
        "python": platform.python_version(),
        "versions": {name: version(name) for name in LIBRARIES},
        "caught": sum(one["verdict"] == CAUGHT for one in results.values()),
        "of": len(results),
        "faults": dict(sorted(results.items())),
    }
    file.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
