"""What goes wrong on one rank ends what the others do with it, soon and clearly; and never is a text a wrong one."""

import pytest

from support.llm.batching.engines import alone
from support.llm.parallel import faults
from support.rank_faults import LIMIT, FaultyRanks

SOON = 3 * LIMIT.total_seconds() + 5  # seconds: a wait in the call, one in its end, and a busy machine

WITHIN = f"within {LIMIT.total_seconds():.0f} s"


@pytest.fixture
def faulty():
    pool = FaultyRanks()
    yield pool
    for process in pool.processes:
        process.kill()


def test_a_rank_that_dies_ends_the_others(faulty, saved_model):
    (first, second), code = faulty.outcomes(faults.in_generate, saved_model("llama")[0], "dies", (1,))
    assert code == faults.DEAD
    assert first[0].startswith("RanksApart: rank 0 of 2 has lost the others") and first[1] < SOON
    assert (
        second[0].startswith("Refused: generate(): rank 0 of 2 has lost the others")
        and second[1] < LIMIT.total_seconds()
    )
    assert faulty.exit_codes() == [0, faults.DEAD]


def test_an_interrupt_of_one_rank_is_no_wrong_text_for_the_others(faulty, saved_model):
    zero, one = faulty.outcomes(faults.in_generate, saved_model("llama")[0], "interrupted", (0,))
    assert zero[0][0] == "KeyboardInterrupt" and one[0][0].startswith("RanksApart")
    for _, (told, seconds) in (zero, one):
        assert told.startswith("Refused: generate()") and seconds < SOON
    assert faulty.exit_codes() == [0, 0]


@pytest.mark.parametrize("fault", ["interrupted", "fails"])
def test_what_goes_wrong_on_all_ranks_alike_leaves_them_in_step(fault, ranks, saved_model):
    folder, stock = saved_model("llama")
    for first, (then, _) in ranks.run(faults.in_generate, folder, fault, (0, 1)):
        assert first[0].startswith(("KeyboardInterrupt", "ValueError"))
        assert then == str([[5, 6, 7, *alone(stock, [5, 6, 7], 6)]])


def test_a_text_that_is_another_one_on_one_rank_is_not_let_out(ranks, saved_model):
    folder, stock = saved_model("llama")
    for (first, _), (then, _) in ranks.run(faults.another_text, folder, 1):
        assert first.startswith("Refused: the end of generate(): what was written is not the same on all ranks")
        assert then == str([[5, 6, 7, *alone(stock, [5, 6, 7], 6)]])


@pytest.mark.share(2)
@pytest.mark.parametrize(("fault", "rank"), [("dies", 1), ("fails", 1), ("interrupted", 0), ("interrupted", 1)])
def test_batches_end_with_a_rank(fault, rank, faulty, saved_model):
    folder, stock = saved_model("llama")
    found = faulty.outcomes(faults.in_batches, folder, fault, rank)
    if fault == "dies":
        assert found.pop(rank) == faults.DEAD
    right = alone(stock, [5, 6, 7], 60)
    for number, calls in enumerate(found):
        batch, again, then = (told for told, _ in calls)
        assert max(seconds for _, seconds in calls) < SOON
        if fault == "interrupted":  # between two steps of the thread, which all end alike
            assert batch == "KeyboardInterrupt" if number == rank else "another rank" in batch
            assert again == str([(right[:6], None)]) and then == str([[5, 6, 7, *right[:6]]])
        else:
            words = ("RanksApart", "lost the others", "of somebody's own")
            assert any(one in batch for one in words), batch
            assert again.startswith("Refused") and then.startswith("Refused")
    assert faulty.exit_codes() == [faults.DEAD if (fault, one) == ("dies", rank) else 0 for one in (0, 1)]


def test_ranks_that_do_other_things_are_refused_by_name(faulty, saved_model):
    folder, stock = saved_model("llama")
    zero, one = faulty.outcomes(faults.apart, folder, saved_model("llama", seed=5, num_hidden_layers=1)[0])
    alone_told, options, model, optimized, inputs, draws, absent, text = (told for told, _ in zero)
    assert alone_told.startswith(f"Refused: accel.optimize: rank 1 did not call it {WITHIN}")
    assert "option graphs" in options and "True on rank 0; False on rank 1" in options
    assert "the model is not the same" in model and "LlamaForCausalLM" in model
    assert optimized == "optimized"
    assert "the inputs" in inputs and "torch.manual_seed" in draws
    assert absent.startswith(f"Refused: generate(): rank 1 did not call it {WITHIN}")
    assert text == str([[5, 6, 7, *alone(stock, [5, 6, 7], 6)]])
    assert [told for told, _ in one] == ["", options, model, optimized, inputs, draws, "", text]
    assert max(seconds for _, seconds in zero) < SOON
