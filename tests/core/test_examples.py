"""Each example is short, and runs as it stands."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path, tmp_path):
    assert len(path.read_text().splitlines()) < 40
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    if path.name == "text_to_image.py":
        assert (tmp_path / "seven.png").stat().st_size > 500
        assert "sites patched" in done.stdout
    if path.name == "compare_and_undo.py":
        assert "bit-equal after the block: True" in done.stdout and "PSNR" in done.stdout


def test_there_are_examples():
    assert len(EXAMPLES) >= 2
