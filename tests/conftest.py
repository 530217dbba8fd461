"""Without a GPU, kernels run in Triton's interpreter, which has to be chosen before their modules load."""

import atexit
import dataclasses
import gc
import logging
import os
import re
import traceback
from collections import Counter
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from zlib import crc32

import pytest
import safetensors.torch  # noqa: F401 (before a test takes float64 for float32, which its tables would keep)
import torch

import accel.api
import accel.errors
import accel.options
from accel.cuda_graphs import pays
from accel.libraries import versions
from support.diffusion import calls as live_calls
from support.diffusion import changes as live_changes
from support.diffusion.oracles import Oracle
from support.diffusion.tiny_models import UNETS, make_sdxl_pipeline, make_unet, make_vae, unet_inputs
from support.everything import EVERYTHING, has_turn
from support.kernels.numbers import assert_as_good_as_torch, poisoned
from support.state import assert_same_state, differences, snapshot


def fusing(*given):
    """What is fused is tested on a CPU too, whether or not it pays there; tests of cpu="auto" put `choose` back."""
    return dataclasses.replace(accel.options.choose(*given), cpu="fuse")


accel.api.choose = fusing
pays.GAIN, pays.LiveTurns.faster = float("inf"), "fused"  # and on a GPU; tests of what pays put their own there

# Under newer versions nothing else is told than under these; tests/core/test_distribution.py asks what is.
versions.TESTED = {package: (oldest, "99.0") for package, (oldest, _) in versions.TESTED.items()}

gc.disable()  # while modules are imported, of which nothing is garbage; pytest_collection_finish enables it

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if not EVERYTHING:  # enough to be written where no graph is captured
        import_module("accel.llm.verify").NEW = 5  # not at the top: its kernels are interpreted from here on
    if not EVERYTHING and find_spec("triton"):  # sizes are small: no index overflows, and to look takes a sixth
        from triton.runtime.interpreter import InterpreterOptions, interpreter_builder

        interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)
    # Without a device these do nothing but format the whole stack and keep it, at every seed, until one comes.
    for absent in (torch.cuda, torch.xpu, torch.mtia):
        absent.manual_seed_all = lambda seed: None


def set_aside():
    """Every object that is there: who collects, as benchmarks do at every figure, need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def few_objects_in_a_module():
    """Half a second a collection otherwise, where a process has gone through many modules."""
    set_aside()


@pytest.fixture
def few_objects():
    """To look at every object is quick: those that are there already, of libraries and other tests, are set aside."""
    set_aside()


outside = []


class Within:
    """Marks errors of calls that may read behind the end of a table: on a GPU these are looked through before."""

    def __enter__(self):
        pass

    def __exit__(self, kind, error, trace):
        if error is not None:
            error.within_tables = True


import_module("accel.llm.recording.position_table").RAISING = Within()


def log_and_note(error, logged=accel.errors.logged):
    """Notes where `optimize` reads behind the end of a table: an error on a CPU, on a GPU the process's end."""
    behind = re.search("index .*out of (range in self|bounds)", str(error))
    if behind and not hasattr(error, "within_tables"):
        text = "".join(traceback.format_exception(error))
        ours = any(frame.f_code is accel.api.optimize.__code__ for frame, _ in traceback.walk_stack(None))
        outside.extend([text] if ours else [])
    return logged(error)


accel.errors.logged = log_and_note


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    outside.clear()
    yield
    assert not outside, outside[0]


POOLS = pytest.StashKey[dict]()
GOLDEN = 0.6180339887  # its multiples, modulo 1, fall evenly whatever a table's rows repeat after
# By the least rows of a table that has no share of its own: one in how many is enough.
SHARES = {16: 64, 8: 32, 2: 16}


def pytest_collection_modifyitems(config, items):
    rows, numbers, kept, left = Counter(map(table, items)), Counter(), Counter(), []
    for item in items if not EVERYTHING else ():
        test, marks = table(item), [mark.args[0] for mark in item.iter_markers("share")]  # a row's may be less
        share = next((share for least, share in SHARES.items() if rows[test] >= least), 1)
        if marks:
            share = min(marks)
        elif item.get_closest_marker("gpu"):
            share = 1
        turns = item.get_closest_marker("turns")
        in_share = numbers[test] * GOLDEN % 1 < 1 / share
        # From a number of its own, so that tests of one row have their turns at different commits.
        if not in_share or (turns and not has_turn(kept[test] + crc32(test.encode()), *turns.args)):
            left.append(item)
        kept[test] += in_share
        numbers[test] += 1
    if left:
        config.hook.pytest_deselected(items=left)
        deselected = set(left)
        items[:] = [item for item in items if item not in deselected]
    items.sort(key=lambda item: not in_other_processes(item))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def in_other_processes(item) -> bool:
    """Whether it runs in ranks, or compiles. Such tests go first, all to one worker, and so start processes once."""
    return "rank_pool" in item.fixturenames or hasattr(item.module, "in_a_process")


def pytest_runtest_teardown(item, nextitem):
    """Ends all ranks once no test follows that needs them: hundreds of gloo's threads wake a hundred times a second."""
    if POOLS in item.config.stash and (nextitem is None or not in_other_processes(nextitem)):
        for pool in item.config.stash[POOLS].values():
            pool.close()
        item.config.stash[POOLS].clear()


def table(item):
    """The test that the item is a row of."""
    return item.nodeid.partition("[")[0]


def pytest_collection_finish(session):
    gc.freeze()
    gc.set_threshold(100_000)  # at 700 new objects, what is set in here for each, a twentieth of all time goes there
    gc.enable()


def pytest_unconfigure(config):
    atexit.register(gc.unfreeze)  # what is never freed, bindings report as leaks


class Log(logging.Handler):
    """What is logged during a test: as pytest's own, which costs every test that does not ask for it."""

    def __init__(self):
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.emit = self.records.append

    @property
    def text(self) -> str:
        return "\n".join(record.getMessage() for record in self.records)

    @contextmanager
    def at_level(self, level: int, name: str):
        logger, before = logging.getLogger(name), logging.getLogger(name).level
        logger.setLevel(level)
        yield
        logger.setLevel(before)


@pytest.fixture
def caplog():
    log = Log()
    logging.getLogger().addHandler(log)
    yield log
    logging.getLogger().removeHandler(log)


@pytest.fixture
def as_good_as_torch(monkeypatch):
    """The check of a kernel; fresh memory is poisoned meanwhile, so that an element no program wrote shows."""
    poisoned(monkeypatch)
    return assert_as_good_as_torch


@pytest.fixture
def in_double(monkeypatch):
    """in_double(): from now on everything is float64; what is float32 otherwise puts numbers next to a half to the
    other side.
    """

    def enter():
        for name in ("float32", "float"):
            monkeypatch.setattr(torch, name, torch.float64)
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)

    return enter


@pytest.fixture(scope="session")
def tiny():
    """Makers of tiny models and their inputs, and what tests ask about them."""
    return SimpleNamespace(
        unet=make_unet,
        vae=make_vae,
        inputs=unet_inputs,
        families=tuple(UNETS),
        snapshot=snapshot,
        assert_same_state=assert_same_state,
        differences=differences,
    )


@pytest.fixture
def sdxl_pipe():
    return make_sdxl_pipeline()


@pytest.fixture
def step_oracle():
    return Oracle


@pytest.fixture
def live():
    return live_changes


@pytest.fixture
def calls():
    return live_calls


@pytest.fixture(params=live_changes.CHANGES, ids=lambda change: change.name)
def change(request):
    """Every change of the table in turn."""
    return request.param


@pytest.fixture(params=live_calls.BETWEEN_STEPS)
def between_steps(request):
    """Everything done between two steps in turn: a function of (pipe, adapter) that gives the keywords of a call."""
    return live_calls.BETWEEN_STEPS[request.param]


@pytest.fixture(scope="session")
def rank_pool(request):
    """Maker of a pool of so many processes of one group, one for each number until no test follows that needs one; a
    new one where the last has ended.
    """
    from support.ranks import RankPool

    pools: dict[int, RankPool] = request.config.stash.setdefault(POOLS, {})

    def pool(size: int) -> RankPool:
        if size not in pools or not pools[size].alive:
            pools[size] = RankPool(size)
        return pools[size]

    return pool
