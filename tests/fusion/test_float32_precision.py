"""TF32: what is set in either of torch's ways is read, switched off for a while, and put back."""

import json
import subprocess
import sys

import pytest

SETTINGS = {  # what a user sets: (products, convolutions) in TF32
    "": (False, True),
    "b.cuda.matmul.allow_tf32 = True": (True, True),
    "b.cudnn.allow_tf32 = False": (False, False),
    "torch.set_float32_matmul_precision('high')": (True, True),
    "b.cuda.matmul.fp32_precision = 'tf32'": (True, True),
    "b.cudnn.conv.fp32_precision = 'ieee'": (False, False),
    "b.fp32_precision = 'tf32'": (True, True),
    "b.fp32_precision = 'ieee'; b.cudnn.conv.fp32_precision = 'ieee'": (False, False),
}
PROGRAM = """
import json, multiprocessing, sys, torch
b = torch.backends
from accel.cuda_graphs.entry import switches
from accel.fusion.float32_precision import convolutions_in_tf32, full_precision, products_in_tf32

def read(settings):
    try:
        return settings()
    except RuntimeError:
        return "raises"

def state():
    return [read(lambda: b.cuda.matmul.allow_tf32), read(lambda: b.cudnn.allow_tf32), b.cuda.matmul.fp32_precision,
            b.cudnn.conv.fp32_precision, b.cudnn.rnn.fp32_precision, b.fp32_precision]

def tried(statement):
    exec(statement)
    before = state()
    found = products_in_tf32(), convolutions_in_tf32()
    with full_precision():
        inside = products_in_tf32(), convolutions_in_tf32()
    switches()
    return found, inside, before, state()

with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
    print(json.dumps(pool.map(tried, json.loads(sys.argv[1]), chunksize=1)))
"""


@pytest.fixture(scope="module")
def told():
    """Each in a process of its own: torch does not forget that the newer way was used."""
    arguments = [sys.executable, "-c", PROGRAM, json.dumps(list(SETTINGS))]
    found = json.loads(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)
    return dict(zip(SETTINGS, found, strict=True))


@pytest.mark.parametrize("statement", SETTINGS)
@pytest.mark.turns(2)
def test_settings_of_either_way(told, statement):
    found, inside, before, after = told[statement]
    assert tuple(found) == SETTINGS[statement]
    assert inside == [False, False]
    assert after == [now if was == "raises" else was for was, now in zip(before, after, strict=True)]
