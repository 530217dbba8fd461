"""The state of a batch's requests on a GPU: nothing waits, a graph holds the draw, ids are those of the CPU."""

import numpy as np
import pytest
import torch

from accel.llm.batching.sampler import Sampler
from accel.llm.batching.sampling import Sampling

VOCABULARY, ROWS = 32003, 15
SETTINGS = [
    Sampling(),
    Sampling(penalty=1.3),
    Sampling(1.0, seed=3),
    Sampling(0.7, 20, 0.9, 0.01, seed=-5),
    Sampling(1.3, 0, 0.8, penalty=0.7, seed=2**62),
]


def filled(device):
    sampler = Sampler(ROWS, VOCABULARY, device)
    for row in range(ROWS):
        sampler.set(row, SETTINGS[row % len(SETTINGS)]._replace(seed=row), range(row, 9 * row), drawn=row)
    return sampler


@pytest.fixture
def strict():
    """Whatever waits for the GPU raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_nothing_waits_and_ids_are_those_of_the_cpu(request):
    logits = torch.randn(4, ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0)).mul(2)
    rows, on_gpu = np.arange(ROWS)[::-1].copy(), logits.cuda()
    rows[7] = -1
    at = torch.from_numpy(rows).cuda()
    sampler = filled("cuda")
    sampler.draw(on_gpu[0], at, rows)  # compiles
    sampler = filled("cuda")
    request.getfixturevalue("strict")
    found = []
    for step in range(4):
        if step == 2:
            sampler.set(5, Sampling(1.0, penalty=1.1, seed=8), [1, 2, 3])
        found.append(sampler.draw(on_gpu[step], at, rows))
    torch.cuda.set_sync_debug_mode("default")
    theirs = filled("cpu")
    differ = 0
    for step in range(4):
        if step == 2:
            theirs.set(5, Sampling(1.0, penalty=1.1, seed=8), [1, 2, 3])
        differ += int((found[step].cpu() != theirs.draw(logits[step], torch.from_numpy(rows), rows)).sum())
    assert differ <= 2  # numbers so near the end of a share that the last digit decides


def test_a_graph_holds_the_draw():
    logits = torch.randn(8, VOCABULARY, device="cuda").bfloat16()
    rows = np.arange(8)
    at = torch.from_numpy(rows).cuda()
    eager, sampler = filled("cuda"), filled("cuda")
    filled("cuda").draw(logits, at, rows)
    sampler.flush()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = sampler.draw(logits, at, rows)
    for step in range(4):
        if step == 2:
            for one in (sampler, eager):
                one.set(3, Sampling(0.5, 7, penalty=1.2, seed=99), [4, 5])
        sampler.flush()
        graph.replay()
        assert torch.equal(ids, eager.draw(logits, at, rows))
