"""Scripts that compile kernels: Triton's interpreter, which these tests run in, stays out of them."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

# Imports once what all scripts do, and runs each of them in a process forked from it.
STARTER = """
import json, os, sys, traceback
import support.kernels.absent_gpu, torch._dynamo, triton.compiler  # the second by operations on absent tensors

for line in sys.stdin:
    script, cache, *arguments = json.loads(line)
    if not (child := os.fork()):
        code = 1
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(os.path.join(cache, name), os.O_CREAT | os.O_WRONLY), number)
        os.environ["TRITON_CACHE_DIR"], sys.argv = cache, ["-c", *arguments]
        try:
            exec(compile(script, "script", "exec"), {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def environment(first: Path | None = None) -> dict[str, str]:
    folders = (*([str(first)] if first else []), "kernels", "tests")
    given = {
        "PYTHONPATH": os.pathsep.join(folders), "TRITON_DEFAULT_FP_FUSION": "1", "TRITON_DISABLE_LINE_INFO": "1",
    }  # fmt: skip
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | given


@functools.cache
def starter() -> subprocess.Popen:
    """The process that forks; it ends when its standard input does."""
    return subprocess.Popen(
        [sys.executable, "-c", STARTER], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def end() -> None:
    """Ends the process that forks, where there is one."""
    if starter.cache_info().currsize:
        started = starter()
        starter.cache_clear()
        started.communicate()


def in_a_process(script: str, cache: Path, *arguments: str, first: Path | None = None) -> str:
    """What the script prints; it can import accel_kernels and support. Nothing is compiled before it runs.

    cache: an empty folder, for what is compiled and printed.
    first: a folder with packages to be taken before those that are installed.
    """
    if first is None:
        started = starter()
        print(json.dumps([script, str(cache), *arguments]), file=started.stdin, flush=True)
        code, printed, errors = started.stdout.readline(), cache / "stdout", cache / "stderr"
        assert code == "0\n", errors.read_text()[-4000:] if errors.exists() else "no process to compile in"
        return printed.read_text()
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=environment(first) | {"TRITON_CACHE_DIR": str(cache)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
