"""A model over several ranks: the same text in every mode, and faults of one rank that all are told."""

import copy

import pytest
import torch
from transformers.distributed import DistributedConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import accel
from accel.tolerances import DRIFT, LOGITS
from support.everything import EVERYTHING
from support.llm import families
from support.llm.batching.engines import alone
from support.llm.miniatures.family import EVEN_VOCAB
from support.llm.near_ties import model_of
from support.llm.parallel import faults, ranks
from support.llm.parallel.modes import STOCK, ahead, all_modes
from support.ranks import LIMIT, FaultyRanks

STEPS = 6
CALL = ranks.padded_call("cpu", STEPS)
# All sums are ours: one for attention and MLP of each layer in a forward, and one for the words where they are divided.
TWO = (
    "llama", "llama-biases", "llama-tied", "mistral", "qwen2", "qwen3", "gemma3", "gpt-neox", "starcoder2", "phi",
    "mixtral", "qwen3-moe",
)  # fmt: skip
# Gathered and split again between two linears, as their plans ask for: those run as transformers has them.
GATHERED = ("phi3", "olmo2", "gpt-oss")
FOUR = ("llama-mha", "gpt-neox")
SCHEMES = (
    ("llama", "int8"), ("llama-biases", "int8-asym"), ("qwen3", "fp8"), ("llama", "int4-g32"), ("mixtral", "int8"),
)  # fmt: skip
WIDE = {"hidden_size": 128, "intermediate_size": 128}  # groups of 32 columns fit into halves
# Whole experts on each rank, as transformers since 5.18 and before is asked for them.
EXPERTS = {"ep_size": 2} if "ep_size" in DistributedConfig.__annotations__ else {"enable_expert_parallel": True}


@pytest.fixture
def saved(saved_model):
    def save(name: str, **changes):
        folder, model = saved_model(name, **changes)
        attention = families.BY_NAME[name].attention
        return model, folder, {"attn_implementation": attention} if attention else {}

    return save


def expect(found: list[dict], tokens: list, stock: list | None = None) -> None:
    for one in found:
        assert one["optimized"] == [tokens]
        assert one["stock"] == [tokens if stock is None else stock]
        assert one["fallbacks"] == [] and one["restored"]


def sums(model) -> int:
    """All-reduces of a forward of ours, where both ends of each layer are divided and the words are too."""
    return 2 * model.config.get_text_config().num_hidden_layers + 1


def rows(share: int, names: tuple, size: int = 2, divided: dict | None = None, options: dict | None = None) -> list:
    given = ((name, size, divided or {}, options or {}) for name in names)
    return [pytest.param(*row, marks=pytest.mark.share(share)) for row in given]


@pytest.mark.parametrize(
    ("name", "size", "divided", "options"),
    [
        *rows(10, TWO),
        *rows(2, GATHERED),
        *rows(2, FOUR, 4),
        *rows(2, ("deepseek-v2",)),
        *rows(1, ("qwen3-moe", "mixtral"), divided=EXPERTS),
        *(row for name, scheme in SCHEMES for row in rows(5, (name,), options={"weights": scheme})),
        *rows(1, ("llama",), options={"kv_cache": "int8"}),
    ],
)
@pytest.mark.turns(6)
def test_ranks_write_the_tokens_of_one_process(name, size, divided, options, rank_pool, saved):
    model, folder, given = saved(name, **(WIDE if "weights" in options else {}))
    found = rank_pool(size).run(ranks.write, folder, [CALL], options, {"tp_size": size} | divided, given)
    stock = model.generate(**CALL).tolist()
    one = accel.optimize(copy.deepcopy(model), **options) if options else model
    expect(found, one.generate(**CALL).tolist(), stock)
    sites, collectives = found[0]["sites"], found[0]["collectives"][1]
    patched = {(path, rule) for path, rule, status, _ in sites if status == "patched"}
    assert ("", "language model") in patched
    if "kv_cache" in options:
        assert "keys and values in int8" in sites[0][3]
    elif options:  # all matrices but the head
        matrices = sum(type(module) in (torch.nn.Linear, MixtralExperts) for module in model.modules())
        assert sum(rule == "weights" for _, rule in patched) == matrices - 1
    elif divided:
        assert [row[2] for row in sites if row[1] == "experts"] == ["patched"] * 2
    elif name in TWO and size == 2:
        assert {(layer, "decoder layer") for layer in families.layers(model)} <= patched
        assert not [row for row in sites if row[2] == "skipped"]
        assert collectives["all_gather_into_tensor"] == STEPS  # logits of words that are divided
        words = sum(row[1] == "word embeddings" for row in sites)
        assert collectives["all_reduce"] == STEPS * (sums(model) - 1 + words)


@pytest.mark.skipif(not EVERYTHING, reason="seconds of work; ACCEL_TEST_EVERYTHING=1 runs it")
def test_a_deep_model_whose_rounding_is_beyond_the_bound(rank_pool, tmp_path):
    """What each rank measures is the same to the bit, and so is what it does after."""
    model_of("llama", num_hidden_layers=10, vocab_size=EVEN_VOCAB).save_pretrained(tmp_path)
    found = rank_pool(2).run(ranks.trial, str(tmp_path), {"tp_size": 2}, (9, 1, 1, 3))
    assert found[0] == found[1] and ("", "language model", "patched") in {row[:3] for row in found[0]["sites"]}
    assert found[0]["off"] > LOGITS[torch.bfloat16] and 0 < found[0]["row"] <= DRIFT * found[0]["moves"]


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
    # Draws are not all alike: that they are equal on all ranks says something.
    assert len(set(map(tuple, one["several"]["tokens"]))) == 3
    assert one["sampling"]["tokens"] != one["greedy"]["tokens"]
    assert first["streamed"] == one["streamed"] and second["streamed"] == [] and len(one["streamed"]) == 7
    assert first["verify"] is second["verify"] is one["verify"] is True
    assert all(first[name] == second[name] == one[name] for name in ("equal", "restored"))


def test_a_clock_is_refused(found):
    for rank in found[0]:
        for name in ("max_time", "max_time criterion"):
            assert rank[name].startswith("Refused") and "max_time=5.0" in rank[name] and "max_new_tokens" in rank[name]


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


@pytest.mark.turns(4)
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


SOON = 3 * LIMIT.total_seconds() + 5  # seconds: a wait in the call, one in its end, and a busy machine

WITHIN = f"within {LIMIT.total_seconds():.0f} s"


@pytest.fixture
def faulty():
    pool = FaultyRanks()
    yield pool
    for process in pool.processes:
        process.kill()


@pytest.mark.turns(4)
def test_a_rank_that_dies_ends_the_others(faulty, saved_model):
    (first, second), code = faulty.outcomes(faults.in_generate, saved_model("llama")[0], "dies", (1,))
    assert code == faults.DEAD
    assert first[0].startswith("RanksApart: rank 0 of 2 has lost the others") and first[1] < SOON
    assert (
        second[0].startswith("Refused: generate(): rank 0 of 2 has lost the others")
        and second[1] < LIMIT.total_seconds()
    )
    assert faulty.exit_codes() == [0, faults.DEAD]


@pytest.mark.turns(4)
def test_an_interrupt_of_one_rank_is_no_wrong_text_for_the_others(faulty, saved_model):
    zero, one = faulty.outcomes(faults.in_generate, saved_model("llama")[0], "interrupted", (0,))
    assert zero[0][0] == "KeyboardInterrupt" and one[0][0].startswith("RanksApart")
    for _, (told, seconds) in (zero, one):
        assert told.startswith("Refused: generate()") and seconds < SOON
    assert faulty.exit_codes() == [0, 0]


@pytest.mark.parametrize("fault", ["interrupted", "fails"])
@pytest.mark.turns(2)
def test_what_goes_wrong_on_all_ranks_alike_leaves_them_in_step(fault, ranks, saved_model):
    folder, stock = saved_model("llama")
    for first, (then, _) in ranks.run(faults.in_generate, folder, fault, (0, 1)):
        assert first[0].startswith(("KeyboardInterrupt", "ValueError"))
        assert then == str([[5, 6, 7, *alone(stock, [5, 6, 7], 6)]])


@pytest.mark.turns(2)
def test_a_text_that_is_another_one_on_one_rank_is_not_let_out(ranks, saved_model):
    folder, stock = saved_model("llama")
    for (first, _), (then, _) in ranks.run(faults.another_text, folder, 1):
        assert first.startswith("Refused: the end of generate(): what was written is not the same on all ranks")
        assert then == str([[5, 6, 7, *alone(stock, [5, 6, 7], 6)]])


@pytest.mark.share(2)
@pytest.mark.parametrize(("fault", "rank"), [("dies", 1), ("fails", 1), ("interrupted", 0), ("interrupted", 1)])
@pytest.mark.turns(4)
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


@pytest.mark.turns(4)
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
