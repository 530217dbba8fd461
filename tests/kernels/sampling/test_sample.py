"""The reference against transformers' processors, and the kernel in Triton's interpreter against the reference."""

import math

import pytest
import torch
from accel_kernels import SamplingTable, sample
from accel_kernels.sampling.sample import _filtered
from accel_kernels.sampling.table import seen_words
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from support.everything import EVERYTHING
from support.kernels.numbers import poisoned

INF = float("inf")
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def table_of(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, penalty=1.0, seeds=None, drawn=0, seen=None):
    """Numbers are for all rows; seeds are 0, 1, ... unless given."""

    def column(value, dtype=torch.float32):
        return torch.as_tensor(value, dtype=dtype).expand(rows).clone()

    return SamplingTable(
        column(temperature),
        column(top_k, torch.int32),
        column(top_p),
        column(min_p),
        column(penalty),
        column(torch.arange(rows) if seeds is None else seeds, torch.int64),
        column(drawn, torch.int64),
        column(0, torch.int32),
        seen,
    )


def with_seen(vocabulary, *tokens):
    """The words of `seen`, of rows of tokens."""
    seen = torch.zeros(len(tokens), seen_words(vocabulary), dtype=torch.int64)
    for row, ids in zip(seen, tokens, strict=True):
        for token in set(ids):
            row[token // 32] += 1 << token % 32
    return seen.to(torch.int32)


def many(output):
    return output if isinstance(output, tuple) else (output,)


@pytest.fixture
def kernel(monkeypatch):
    """The kernel in the interpreter; fresh memory holds what no program would write."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the compiled kernels")

    def run(logits, table, rows, **more):
        assert sample.supports(logits, table, rows, **more) is None
        with monkeypatch.context() as patch:
            poisoned(patch)
            result = sample.triton(logits, table, rows, **more)
        assert not table.split_counters.any()
        return result

    return run


@pytest.fixture(params=["reference", "kernel"])
def run(request):
    return sample.reference if request.param == "reference" else request.getfixturevalue("kernel")


SETTINGS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 5000},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 1e-6},
    {"top_p": 0.0},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 0.3, "top_k": 40, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 2.0, "top_k": 300, "top_p": 0.97},
    {"temperature": 1.7, "top_p": 0.95, "min_p": 0.02},
]


def processed(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Scores as transformers' processors make them, in their order."""
    chain = [TemperatureLogitsWarper(temperature)] if temperature != 1.0 else []
    chain += [TopKLogitsWarper(top_k)] if top_k else []
    chain += [TopPLogitsWarper(top_p)] if top_p < 1.0 else []
    chain += [MinPLogitsWarper(min_p)] if min_p else []
    scores = logits.float()
    for processor in chain:
        scores = processor(None, scores)
    return scores


def logits_of(kind, vocabulary=997):
    """Rows of random logits; "tied" in bf16, many of one value; "masked" with many at -inf."""
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(6, vocabulary, generator=g) * torch.tensor([0.1, 1.0, 2.0, 3.0, 6.0, 12.0])[:, None]
    if kind == "tied":
        return (logits * 2).round().to(torch.bfloat16)
    if kind == "half":
        return logits.to(torch.float16)
    if kind == "zeros":  # of both signs, with which most of the mass is
        return torch.where(logits > logits.amax(-1, keepdim=True) - 1, logits, logits.sign() * 0.0).to(torch.bfloat16)
    if kind == "masked":
        return logits.masked_fill(torch.rand(logits.shape, generator=g) < 0.9, -INF)
    return logits


@pytest.mark.parametrize("kind", ["random", "tied", "masked"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_can_be_drawn_is_what_transformers_leaves(settings, kind):
    logits = logits_of(kind)
    expected = processed(logits, **settings)
    table = table_of(len(logits), **settings)
    scores = logits.float() / table.temperature[:, None]
    on = torch.ones(len(logits), 1, dtype=torch.bool)
    filters = (t[:, None] for t in (table.top_k, table.top_p, table.min_p))
    found = _filtered(scores, scores.amax(-1, keepdim=True), on, *filters)
    if kind == "tied":  # torch.sort leaves open which of equal scores come first
        found, expected = found.sort(-1).values, expected.sort(-1).values
    assert torch.equal(found, expected)
    ids, logprobs = sample(logits, table, torch.arange(len(logits)), filters=True, logprobs=True)
    wanted = scores.gather(1, ids[:, None])[:, 0] - expected.logsumexp(-1)
    assert (found.gather(1, ids[:, None]) > -INF).all() or kind == "tied"
    torch.testing.assert_close(logprobs, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6, "top_k": 12, "top_p": 0.9, "min_p": 0.02}], ids=str)
def test_tokens_are_drawn_as_often_as_they_are_likely(settings):
    rows = 20000
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(1)).mul(1.5)
    expected = processed(logits, **settings).softmax(-1)[0] * rows
    seeds, drawn = torch.arange(rows) // 100 * 2**33, torch.arange(rows) % 100  # both must give new numbers
    table = table_of(rows, **settings, seeds=seeds, drawn=drawn)
    ids = sample(logits.expand(rows, -1), table, torch.arange(rows), filters=bool(settings))
    counts = torch.bincount(ids, minlength=20).float()
    possible = expected > 0
    assert not counts[~possible].any()
    freedom = int(possible.sum()) - 1
    chi_square = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    assert abs(chi_square - freedom) < 3.5 * math.sqrt(2 * freedom)


def test_the_penalty_is_that_of_transformers():
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(5))
    tokens = [[1, 5, 99, 31, 32, 63, 1], [0], list(range(40, 100))]
    table = table_of(3, temperature=0.0, penalty=[3.0, 1.0, 0.4], seen=with_seen(100, *tokens))
    ids, logprobs = sample(logits, table, torch.arange(3), filters=False, logprobs=True)
    for i, (ids_seen, penalty) in enumerate(zip(tokens, (3.0, 1.0, 0.4), strict=True)):
        scores = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids_seen]), logits[i : i + 1].clone())
        assert ids[i] == scores.argmax() and logprobs[i] == pytest.approx(float(scores.log_softmax(-1).max()), 1e-5)
        assert torch.equal(table.seen[i : i + 1], with_seen(100, [*ids_seen, int(ids[i])]))


SMALL = [case for case in sample.cases if case.small]
# The kernel computes in float32 whatever it reads: the first case runs in every dtype, the others in one in turn.
RUNS = [
    pytest.param(case, dtype, marks=[pytest.mark.share(1)] * (case.name == "penalty"))
    for number, case in enumerate(SMALL)
    for dtype in (
        DTYPES[1:2] if "filters" in case.name else DTYPES if EVERYTHING or number == 0 else [DTYPES[number % 3]]
    )
]


@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=lambda value: getattr(value, "name", str(value)))
def test_the_kernel_draws_what_the_reference_draws(case, dtype, kernel):
    (logits, mine, rows), more = case.make(CPU, dtype)
    (_, theirs, _), _ = case.make(CPU, dtype)
    found, wanted = many(kernel(logits, mine, rows, **more)), many(sample.reference(logits, theirs, rows, **more))
    assert torch.equal(found[0], wanted[0]) and found[0].dtype == torch.int64
    torch.testing.assert_close(found[1:], wanted[1:], rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.equal(mine.drawn, theirs.drawn)
    assert mine.seen is None or torch.equal(mine.seen, theirs.seen)


EDGES = [
    pytest.param("even", {"top_k": 4400, "top_p": 0.5}, marks=pytest.mark.share(1)),  # exactly enough is enough
    ("tied", {"top_k": 3}),  # ties with the k-th stay
    ("tied", {"top_p": 0.4}),  # of those at the edge some
    ("tied", {"temperature": 3.0, "top_p": 0.95, "min_p": 0.02}),
    ("tied", {"temperature": 0.7, "top_p": 0.9999, "min_p": 0.1}),  # those at the edge of top-p go by min-p
    ("tied", {"temperature": 0.02, "top_p": 0.0}),
    ("zeros", {"top_p": 0.9}),
    ("half", {"temperature": 2.5, "top_p": 0.9}),  # the edge lies beyond zero
    ("half", {"top_p": 0.9999999}),
    ("masked", {"top_p": 0.99}),
    ("flat", {"top_p": 0.5}),  # more groups than a program holds, all of one score
    ("flat", {"top_p": 0.1}),  # 0.1 is more than a tenth in fp32: one more stays
    ("flat", {"top_k": 4500, "top_p": 0.1}),
    ("flat", {"top_k": 4400, "top_p": 0.9911}),
    ("flat", {"min_p": 0.5}),
    ("broad", {"temperature": 3.0, "top_p": 0.97}),
    ("masked", {"top_k": 900, "min_p": 0.001}),
    ("broad", {"top_p": 0.0}),
    ("broad", {"top_k": 100000, "top_p": 1e-9}),
]


@pytest.mark.parametrize(("kind", "settings"), EDGES, ids=str)
def test_the_kernel_finds_the_edges(kind, settings, kernel):
    logits = torch.zeros(1, 4500) if kind in ("flat", "even") else logits_of(kind, 4500)[1:2]
    if kind == "even":  # two values of one weight
        logits[:, 2200:4400], logits[:, 4400:] = -1e-9, -INF
    wanted = sample.reference(logits, table_of(1, **settings), torch.tensor([0]), filters=True, logprobs=True)
    found = kernel(logits, table_of(1, **settings), torch.tensor([0]), filters=True, logprobs=True)
    assert torch.equal(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.8}, {"top_k": 60}, {"min_p": 0.1}], ids=str)
def test_the_kernel_draws_the_same_whatever_the_number(settings, kernel):
    """Seed after seed, over three pieces of which the third is not full."""
    n = 10
    logits, rows = logits_of("random", 9001)[1:2].bfloat16().repeat(n, 1), torch.arange(n)
    given = {"filters": bool(settings), "nucleus": "top_k" not in settings}
    found = kernel(logits, table_of(n, **settings), rows, **given)
    assert torch.equal(found, sample.reference(logits, table_of(n, **settings), rows, **given))
    assert (found >= 4096).any() and len(found.unique()) > n // 2


def test_rows_without_top_k_are_not_filtered_unless_told(run):
    logits, rows = logits_of("random", 300)[:1].repeat(6, 1), torch.arange(6)  # nearly even
    settings = {"top_p": [1.0, 0.1, 0.1, 1.0, 0.5, 0.9], "min_p": [0.0, 0.0, 0.3, 0.3, 0.0, 0.0]}
    mixed = settings | {"top_k": [0, 2, 0, 0, 3, 0]}
    found = run(logits, table_of(6, **mixed), rows, filters=True, nucleus=False)
    filtered = run(logits, table_of(6, **mixed), rows, filters=True)
    plain = run(logits, table_of(6), rows, filters=False)
    assert torch.equal(found[[1, 4]], filtered[[1, 4]]) and torch.equal(found[[0, 2, 3, 5]], plain[[0, 2, 3, 5]])
    assert not torch.equal(found, filtered)


def test_filters_that_keep_everything_change_nothing(run):
    logits, rows = logits_of("random", 300), torch.arange(6)
    plain = run(logits, table_of(6), rows, filters=False)
    assert torch.equal(run(logits, table_of(6), rows, filters=True), plain)
    assert torch.equal(run(logits, table_of(6, top_k=300), rows, filters=True), plain)


def test_company_and_order_change_nothing(run):
    (logits, table, rows), more = next(case for case in SMALL if case.name == "filters").make(CPU, torch.bfloat16)
    more["logprobs"] = True
    fresh = [t if t is None else t.clone() for t in table]
    together = run(logits, table, rows, **more)
    for i in (1, 3, 8):
        own = SamplingTable(*(t if t is None else t.clone() for t in fresh))
        alone = run(logits[i : i + 1], own, rows[i : i + 1], **more)
        assert torch.equal(alone[0][0], together[0][i]) and torch.equal(alone[1][0], together[1][i])
    again = SamplingTable(*fresh)
    order = torch.tensor([12, 3, 1, 8, 5])
    mixed = run(logits[order], again, rows[order].long(), **more)
    assert torch.equal(mixed[0], together[0][order])
    chosen = rows[order][rows[order] >= 0].long()
    assert torch.equal(again.drawn[chosen], table.drawn[chosen])
    later = run(logits[order], again, rows[order], **more)[0]  # the next numbers of the same requests
    assert not torch.equal(later, mixed[0])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}, {"top_p": 0.9}], ids=str
)
def test_rows_that_give_no_token_are_marked(run, settings):
    """And harm no other row."""
    logits = torch.randn(7, 77, generator=torch.Generator().manual_seed(2))
    logits[0, 76] = float("nan")
    logits[1] = -INF
    logits[2] = float("nan")
    logits[3, [9, 40]] = INF
    logits[4] = -INF
    logits[4, 70] = 1.0
    rows = torch.tensor([0, 1, 2, 3, 4, -1, 6])
    table = table_of(7, **settings, penalty=2.0, seen=torch.zeros(7, 3, dtype=torch.int32))
    ids, logprobs = run(logits, table, rows, filters="top_p" in settings, logprobs=True)
    assert ids[:6].tolist() == [-1, -1, -1, 9, 70, -1] and ids[6] >= 0
    assert logprobs.isnan().tolist() == [True, True, True, False, False, True, False]
    assert logprobs[3] == logprobs[4] == 0.0 or settings.get("temperature") == 0.0
    assert table.drawn.tolist() == [0, 0, 0, 1, 1, 0, 1]
    assert torch.equal(table.seen, with_seen(77, [], [], [], [9], [70], [], [int(ids[6])]))
    if settings.get("temperature") == 0.0:
        assert torch.equal(ids[[3, 4, 6]], logits[[3, 4, 6]].argmax(-1))


def test_greedy_takes_the_first_of_the_largest(kernel):
    logits = torch.zeros(2, 5000, dtype=torch.bfloat16)
    logits[0, [4999, 4097, 1234]] = 2.0
    logits[1, ::2] = -0.0
    for run in (kernel, sample.reference):
        assert run(logits, table_of(2, temperature=0.0), torch.arange(2), filters=False).tolist() == [1234, 0]


def test_what_the_kernel_cannot_take_is_named():
    logits, rows = torch.randn(2, 40), torch.arange(2)
    for reason, args in (
        ("dtype", (logits.double(), table_of(2), rows)),
        ("empty", (logits[:0], table_of(2), rows[:0])),
        ("along the vocabulary", (logits.t().contiguous().t(), table_of(2), rows)),
        ("vocabulary", (torch.zeros(2**19 + 1).expand(2, -1), table_of(2), rows)),
        ("rows", (logits, table_of(2), rows[:1])),
        ("rows", (logits, table_of(2), rows.float())),
        ("table", (logits, table_of(2)._replace(top_p=torch.ones(4)[::2]), rows)),
    ):
        assert reason in (sample.supports(*args, filters=True) or "")
