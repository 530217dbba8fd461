"""CUDA graphs of transformers that diffusers divides along the sequence: by all ranks, or stock blocks."""

import pytest

from accel.diffusion.dit.block import DIVIDED_WITHOUT_GRAPH
from support.parallel import sequence_graphs as told_to


@pytest.mark.parametrize("order", ["optimized first", "divided first"])
def test_all_ranks_capture_at_the_same_call(ranks, order):
    for found in ranks.run(told_to.graphs, order, None, {}):
        assert found["stock"] <= 1e-5 and max(found["off"]) <= 1e-5
        assert found["captures"] == [2] and found["replays"] == 3
        assert found["plans"] and all(found["plans"]) and not found["told"]
        assert [status for status, _ in found["rows"]] == ["graph"] and not found["soon"]


def test_where_one_rank_cannot_capture_all_run_stock_blocks(ranks):
    first, second = ranks.run(told_to.graphs, "divided first", 1, {})
    assert first["rows"] == [("eager", "another rank could not capture it")]
    assert second["rows"] == [("eager", "capture failed: RuntimeError: the host reads numbers")]
    for found in (first, second):
        assert found["captures"] == [2] and found["replays"] == 0 and max(found["off"]) <= 1e-5
        assert found["exact"][1:] == [True] * 3
        told = [(path, calls) for path, reason, calls in found["told"] if reason == DIVIDED_WITHOUT_GRAPH]
        assert len(told) == found["blocks"] and {calls for _, calls in told} == {3}


@pytest.mark.parametrize("options", [{"ulysses_anything": True}, {"graphs": False}])
def test_without_graphs_blocks_run_stock(ranks, options):
    for found in ranks.run(told_to.graphs, "divided first", None, options):
        assert not found["captures"] and found["exact"] == [True] * 4 and not found["plans"]
        reasons = {reason: calls for _, reason, calls in found["told"]}
        assert reasons[DIVIDED_WITHOUT_GRAPH] == 4
        uneven = "no graph: ranks tell each other the lengths of their sequences through the host (ulysses_anything)"
        assert reasons.get(uneven) == (4 if "ulysses_anything" in options else None)


def test_what_forbids_a_graph_of_a_divided_model(ranks):
    for found in ranks.run(told_to.obstacles):
        assert found["whole"] is None and found["divided"] is None and found["holds"] and found["changed"]
        assert found["hook"] == "hooks on proj_out may move weights (offload) or divide work among ranks"
        for name in ("replace", "replace_beneath"):
            assert found[name] == "proj_out has a replaced forward that may keep state"
        assert found["forget"].startswith("hooks on FluxTransformer2DModel")
        assert found["forget_mesh"] == "the ranks that divide its sequences are not known"
        assert found["other"].startswith("the attention of transformer_blocks.0.attn is divided among ranks")


def test_what_a_graph_gives_waits_for_nothing(ranks):
    assert ranks.run(told_to.arrived) == [(True, True, True)] * 2
