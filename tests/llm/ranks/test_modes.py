"""All ways of generate() on ranks that share a model, with the tokens of one process."""

import pytest

from support.llm.parallel.modes import STOCK, ahead, all_modes


@pytest.fixture(scope="module")
def found(rank_pool, saved_model):
    """(What the two ranks gave, what one process did), by mode."""
    folders = saved_model("llama")[0], saved_model("llama", seed=5, num_hidden_layers=1)[0]
    return rank_pool(2).run(all_modes, *folders, timeout=150), all_modes(*folders)


def test_every_mode_writes_what_one_process_writes(found):
    (first, second), one = found
    modes = {name: told for name, told in one.items() if isinstance(told, dict) and "tokens" in told}
    assert len(modes) > 18
    for name, told in modes.items():
        assert first[name] == second[name], name
        assert first[name]["tokens"] == told["tokens"], name
        assert first[name]["fallbacks"] == told["fallbacks"] and bool(told["fallbacks"]) == (name in STOCK), name
        assert first[name]["sums"] >= 2 * 2 * 2 and not told["sums"], name  # two a layer, of two steps at least


def test_draws_are_not_all_alike(found):
    """So that equal draws on all ranks say something."""
    _, one = found
    assert len(set(map(tuple, one["several"]["tokens"]))) == 3
    assert one["sampling"]["tokens"] != one["greedy"]["tokens"]


def test_the_first_rank_alone_streams(found):
    (first, second), one = found
    assert first["streamed"] == one["streamed"] and second["streamed"] == [] and len(one["streamed"]) == 10


def test_a_clock_is_refused(found):
    for rank in found[0]:
        for name in ("max_time", "max_time criterion"):
            assert rank[name].startswith("Refused") and "max_time=5.0" in rank[name] and "max_new_tokens" in rank[name]


def test_verify_and_restore(found):
    (first, second), one = found
    assert first["verify"] is second["verify"] is one["verify"] is True
    assert first["equal"] == second["equal"] == one["equal"]
    assert first["restored"] == second["restored"] == one["restored"]


def test_the_first_rank_reports_for_all(found):
    (first, second), one = found
    table, line = first["report"], second["report"].strip()
    assert table.startswith("accel, rank 0 of 2: ") and "decoder layer" in table
    assert line.startswith("accel, rank 1 of 2: ") and "sites patched" in line and "decoder layer" not in line
    assert len(line.splitlines()) == 1
    assert (first["told"]["rank"], second["told"]["rank"], first["told"]["ranks"]) == (0, 1, 2)
    assert first["told"]["sites"] == second["told"]["sites"]
    assert "rank" not in one["told"] and one["report"].startswith("accel: ")
    assert first["nothing"] == second["nothing"] == one["nothing"]


def test_the_loop_that_runs_ahead_takes_as_many_steps_on_all_ranks(rank_pool, saved_model):
    """Steps that turn out to come after the end too, with a streamer on one rank alone."""
    folder, _ = saved_model("llama")
    first, second = rank_pool(2).run(ahead, folder)
    one = ahead(folder)
    assert first["loops"] == second["loops"] == one["loops"] == 4
    assert first["given"] == one["given"] and second["given"] == []
    for name in ("greedy", "ends", "drawn", "streamed"):
        assert first[name] == second[name] and first[name][0] == one[name][0], name
        assert first[name][1] >= 2 * 2 * 2
    assert len(one["ends"][0][0]) < 34  # rows ended before the limit
