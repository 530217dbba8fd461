"""generate_batch of an optimized model beside stock's: the same answers, under the same names, in the same order."""

import copy
import inspect
import pickle
import threading

import pytest
import torch
from transformers import ContinuousBatchingConfig, ContinuousBatchingManager, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

import accel
from accel.llm.batching.hook import CACHED, INIT, InitContinuousBatching
from accel.llm.batching.limits import limits_of
from accel.llm.batching.manager import BatchManager
from support.llm.miniatures.family import VOCAB

CONFIG = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
LOGPROBS = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64, return_logprobs=True)
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
LENGTHS = (3, 9, 1, 17, 40, 9)


def prompts(lengths=LENGTHS, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=g).tolist() for length in lengths]


def batch(model, ids=None, **given):
    """Results by id, of prompts of many lengths."""
    config = GenerationConfig(**(GREEDY | given.pop("generation", {})))
    given = {"continuous_batching_config": CONFIG} | given
    return model.generate_batch(prompts() if ids is None else ids, generation_config=config, **given)


def tokens(results):
    return {name: one.generated_tokens for name, one in results.items()}


@pytest.fixture
def made(monkeypatch):
    """Managers that were made, of both kinds."""
    found = []
    for kind in (BatchManager, ContinuousBatchingManager):

        def init(self, *args, before=kind.__init__, **kwargs):
            found.append(self)
            before(self, *args, **kwargs)

        monkeypatch.setattr(kind, "__init__", init)
    return found


# -- as stock ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "phi3"])
def test_results_are_those_of_stock(name, pair_of, made):
    model, stock = pair_of(name)
    attention = model.config._attn_implementation
    before = accel.report(model).fallbacks  # of others that have this model too
    given = {"record_timestamps": True, "continuous_batching_config": LOGPROBS}
    got = batch(model, **given)
    assert [type(one) for one in made] == [BatchManager] and accel.report(model).fallbacks == before
    assert model.config._attn_implementation == attention
    wanted = batch(stock, **given)
    assert list(got) == list(wanted) and tokens(got) == tokens(wanted)
    for name, prompt in zip(got, prompts(), strict=True):
        mine, theirs = got[name], wanted[name]
        assert type(mine) is type(theirs) is GenerationOutput and vars(mine).keys() == vars(theirs).keys()
        assert mine.prompt_ids == theirs.prompt_ids == prompt
        assert (mine.status, mine.error) == (theirs.status, theirs.error)
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5) and len(mine.logprobs) == 6
        assert len(mine.timestamps) == len(theirs.timestamps) == 6 and mine.timestamps == sorted(mine.timestamps)
        assert mine.created_time < mine.lifespan[0] <= mine.timestamps[0] <= mine.lifespan[1]


def test_an_end_and_several_answers(pair_of, made):
    model, stock = pair_of("llama")
    first = batch(stock)["req_0"].generated_tokens
    ends = {"generation": {"eos_token_id": [first[2], first[3]]}}
    assert tokens(batch(model, **ends)) == tokens(batch(stock, **ends))
    several = {"generation": {"num_return_sequences": 3, "do_sample": True, "top_k": 1}}  # one token to choose from
    got, wanted = batch(model, **several), batch(stock, **several)
    assert got.keys() == wanted.keys() and tokens(got) == tokens(wanted)
    assert all(one.error is None for one in got.values())


def test_defaults_are_those_of_stock(pair, made):
    """No configuration at all: the model's own; a batching configuration inside of a generation configuration."""
    model, stock = pair("llama")
    for one in (model, stock):
        one.generation_config.update(max_new_tokens=3, do_sample=False)
    stock_alone = {name: answer[:3] for name, answer in tokens(batch(stock)).items()}
    assert tokens(model.generate_batch(prompts())) == stock_alone
    inside = GenerationConfig(**GREEDY)
    inside.continuous_batching_config = CONFIG
    model.generate_batch(prompts(), generation_config=inside)
    assert made[-1].continuous_batching_config == CONFIG
    assert model.generate_batch([]) == {}
    assert tokens(model.generate_batch(prompts(), max_new_tokens=2, progress_bar=True)) == {
        name: answer[:2] for name, answer in stock_alone.items()
    }
    assert model.generation_config.eos_token_id is None  # which stock changes


def test_paged_generate_is_met_too(pair_of, made):
    model, stock = pair_of("llama")
    ids = torch.tensor(prompts((5,)))
    got = model.generate(ids, cache_implementation="paged", **GREEDY)
    assert got.tolist() == [stock.generate(ids, **GREEDY).tolist()]
    assert type(made[0]) is BatchManager and isinstance(vars(model)[INIT], InitContinuousBatching)
    assert inspect.signature(getattr(model, INIT)) == inspect.signature(getattr(stock, INIT))


# -- kept managers -----------------------------------------------------------------------------------------------------


def test_a_manager_is_kept_and_freed_as_stocks_is(pair, made):
    model, stock = pair("llama")
    wanted = tokens(batch(stock))
    assert list(tokens(batch(model, persistent_manager=True)).values()) == list(wanted.values())
    kept = getattr(model, CACHED)
    engine = kept.engine
    assert kept.warmed_up and engine is not None
    second = tokens(batch(model, persistent_manager=True))
    assert list(second) == [f"req_{n}" for n in range(len(LENGTHS), 2 * len(LENGTHS))]  # it counts on
    assert list(second.values()) == list(wanted.values())
    assert getattr(model, CACHED) is kept and kept.engine is engine and made.count(kept) == len(made) - 1
    model.destroy_cached_continuous_batching_manager()
    assert not hasattr(model, CACHED) and kept.engine is None
    assert tokens(batch(model)) == wanted


def test_a_kept_manager_goes_by_what_the_call_says(pair):
    """Where the second call asks for more than the first needed, it makes room; stock keeps to the first's settings."""
    model, stock = pair("llama")
    batch(model, prompts((3,)), persistent_manager=True)
    longer = prompts((30, 90), seed=3)
    wanted = batch(stock, longer, generation={"max_new_tokens": 20})
    end = {"eos_token_id": wanted["req_0"].generated_tokens[7]}
    got = list(batch(model, longer, persistent_manager=True, generation=end | {"max_new_tokens": 20}).values())
    assert got[0].generated_tokens == wanted["req_0"].generated_tokens[:8]
    assert got[1].generated_tokens == wanted["req_1"].generated_tokens[: len(got[1].generated_tokens)]


def test_stocks_kept_manager_stays_stocks(pair, made):
    _, stock = pair("llama")
    batch(stock, persistent_manager=True)
    accel.optimize(stock)
    batch(stock)
    assert [type(one) for one in made] == [ContinuousBatchingManager]
    stock.destroy_cached_continuous_batching_manager()
    batch(stock)
    assert type(made[-1]) is BatchManager


# -- models that stock batches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["hooks", "another layer", "beams"])
def test_what_is_refused_runs_stock_and_is_told(why, pair, made):
    model, stock = pair("llama")
    wanted, given = tokens(batch(stock)), {}
    made.clear()
    if why == "hooks":
        model.model.layers[0].register_forward_hook(lambda *args: None)
    if why == "another layer":
        model.model.layers[0] = copy.deepcopy(stock.model.layers[0], {id(stock.config): model.config})
    if why == "beams":
        given = {"generation": {"num_beams": 2}}
    assert tokens(batch(model, **given)) == wanted and type(made[-1]) is ContinuousBatchingManager
    ((_, reason, calls),) = [row for row in accel.report(model).fallbacks if "generate_batch" in row[1]]
    assert reason.startswith("generate_batch: ") and calls == 1


def test_what_a_thread_is_in_is_not_what_another_is_in(pair, made):
    """Steps run on a thread of their own, without gradients and autocast, and in evaluation mode, as in stock."""
    model, stock = pair("llama")
    wanted = tokens(batch(stock))
    made.clear()
    model.train()
    with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert tokens(batch(model)) == wanted
    assert [type(one) for one in made] == [BatchManager] and not model.training


# -- what changes meanwhile --------------------------------------------------------------------------------------------


def test_weights_changed_between_calls_and_in_a_pause(pair):
    """A manager that is kept shares nothing that was computed with other weights."""
    model, stock = pair("llama")
    ids = prompts((130, 130))
    batch(model, ids, persistent_manager=True)

    def change():
        for one in (model, stock):
            for layer in one.model.layers:
                layer.self_attn.k_proj.weight.data.mul_(-3)
                layer.mlp.up_proj.weight.data.neg_()

    change()
    assert list(tokens(batch(model, ids, persistent_manager=True)).values()) == list(tokens(batch(stock, ids)).values())
    manager = getattr(model, CACHED)
    manager.start()
    with manager.pause():
        change()
    name = manager.add_request(ids[0])
    assert manager.get_result(name, timeout=60).generated_tokens == batch(stock, ids[:1])["req_0"].generated_tokens
    manager.stop()


def test_restore_and_verify_end_what_runs(pair, made):
    model, stock = pair("llama")
    manager = model.init_continuous_batching(GenerationConfig(**GREEDY), CONFIG)
    manager.start()
    name = manager.add_request([3, 4, 5], max_new_tokens=10**6)
    accel.verify(model)  # in which the model's parts are taken out for a moment
    assert "no longer optimized" in manager.get_result(name).error
    batch(model, persistent_manager=True)
    kept, running = getattr(model, CACHED), InitContinuousBatching.manager(vars(model)[INIT], None)
    running.start()
    names = [running.add_request([3, 4, 5], max_new_tokens=100, streaming=True) for _ in range(3)]
    assert running.get_result(timeout=60) is not None
    accel.restore(model)
    assert INIT not in vars(model) and not hasattr(model, CACHED) and not running.is_running()
    assert kept.engine is None and running.engine is None
    ended = {result.request_id: result for result in running}
    assert ended.keys() == set(names)
    assert all(one.status is RequestStatus.FAILED and "no longer optimized" in one.error for one in ended.values())
    made.clear()
    assert tokens(batch(model)) == tokens(batch(stock))
    assert type(made[0]) is ContinuousBatchingManager


def test_copies_are_batched_by_themselves(pair, made):
    model, stock = pair("llama")
    wanted = tokens(batch(stock))
    batch(model, persistent_manager=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert vars(other)[INIT].module is other and vars(other)[CACHED] is None
        made.clear()
        assert tokens(batch(other)) == wanted
        assert [type(one) for one in made] == [BatchManager] and made[0].model is other
    model.destroy_cached_continuous_batching_manager()


# -- faults ------------------------------------------------------------------------------------------------------------


def test_an_interrupt_of_generate_batch_ends_it_at_once(pair_of, monkeypatch):
    model, _ = pair_of("llama")

    def interrupted(self, *args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(BatchManager, "get_result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        batch(model, generation={"max_new_tokens": 10**6})
    assert not [thread for thread in threading.enumerate() if thread.name == "accel-batching"]


def test_an_error_of_the_caller_lets_the_rest_finish(pair_of):
    model, _ = pair_of("llama")
    config = GenerationConfig(**GREEDY)
    with (
        pytest.raises(ZeroDivisionError),
        model.continuous_batching_context_manager(config, continuous_batching_config=CONFIG) as manager,
    ):
        manager.add_requests(prompts())
        raise ZeroDivisionError
    assert len(list(manager)) == len(LENGTHS) and not manager.is_running()


def test_sizes_come_from_stocks_configuration(pair_of):
    forward = vars(pair_of("llama")[0])["forward"]
    config = ContinuousBatchingConfig(
        max_requests_per_batch=7, max_batch_tokens=33, max_memory_percent=0.5, allow_block_sharing=False
    )
    found = limits_of(forward, config)
    assert (found.rows, found.tokens, found.memory, found.share, found.blocks) == (7, 33, 0.5, False, None)
    assert limits_of(forward, CONFIG).blocks == 8 * 256 // 64
    with pytest.raises(ValueError, match="memory=1.5"):
        limits_of(forward, ContinuousBatchingConfig(max_memory_percent=1.5))
