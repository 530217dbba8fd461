"""Every script at its tiny size, and the rules by which rows are made, with scripts that are no models."""

import json

import pytest
import torch

from accel.bench.processes import spawn
from accel.bench.results import WrongResult
from accel.bench.scripts import plot, results, runner
from accel.bench.scripts.judging import judge_outputs
from accel.bench.scripts.registry import SCRIPTS, find_scripts
from accel.bench.scripts.script import Script, Size
from accel.bench.timing import within

TINY = Size(torch.device("cpu"), tiny=True)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """What is timed says nothing here."""
    for name in ("LEAST_ROUNDS", "WARM_UP"):
        monkeypatch.setattr(runner, name, 1)


@pytest.mark.share(12)
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.turns(2)
def test_it_runs_stock_and_with_accel(name):
    script = SCRIPTS[name]
    if reason := script.missing(TINY):
        pytest.skip(reason)
    row = runner.run_row(script, TINY, 0.0)
    assert "failed" not in row, row["failed"]
    assert row["error"].get("relative_rms") is not None or row["error"]["equal"] <= row["error"]["tokens"]
    assert min(row[side]["least_ms"] for side in ("stock", "accel")) > 0
    assert row["ratio"] > 0
    assert row["path"] != "stock" or row["ran_stock"] or row["skipped"] or not row["patched"]


class Fake:
    """A script whose object is a number, which accel is told to double where it is `wrong`."""

    def __init__(self, monkeypatch, wrong=1.0, **errors):
        self.made = []
        monkeypatch.setattr(runner.accel, "optimize", self.optimize)
        monkeypatch.setattr(runner.accel, "report", lambda obj: runner.Report([], [], []))
        self.wrong, self.errors = wrong, errors

    def optimize(self, obj):
        if "optimize" in self.errors:
            raise self.errors["optimize"]
        obj["factor"] = self.wrong

    def script(self, name="fake"):
        def build(size):
            if "build" in self.errors:
                raise self.errors["build"]
            obj = {"factor": 1.0}
            return obj, lambda: obj["factor"] * torch.ones(3)

        return Script(name, "about", build)


def run(scripts, **given):
    kept = []
    result = runner.run_scripts(scripts, TINY, 0.0, keep=lambda one: kept.append(json.loads(json.dumps(one))), **given)
    return result, kept


def test_a_script_that_fails_is_a_row_and_the_next_one_runs(monkeypatch):
    good = Fake(monkeypatch).script("good")
    failing = Fake(monkeypatch, build=MemoryError("no room")).script("failing")
    result, kept = run([failing, good])
    assert [row["script"] for row in result["rows"]] == ["failing", "good"]
    assert "no room" in result["rows"][0]["failed"] and result["rows"][1]["ratio"] > 0
    assert [len(one["rows"]) for one in kept] == [1, 2]  # written after every row
    assert result["least"]["script"] == "good"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"wrong": 1.5}, "wrong result"),
        ({"wrong": float("nan")}, "NaN"),
        ({"optimize": TypeError("no")}, "accel: Type"),
    ],
)
def test_what_accel_does_wrong_is_told_and_not_timed(monkeypatch, given, words):
    (row,) = run([Fake(monkeypatch, **given).script()])[0]["rows"]
    assert words in row["failed"] and "ratio" not in row


def test_what_cannot_run_is_left_out_with_the_reason(monkeypatch):
    fake = Fake(monkeypatch).script()
    absent = Script("absent", "", fake.build, packages=("no_such_package",))
    cards = Script("cards", "", fake.build, cards=2)
    reasons = [row["left_out"] for row in run([absent, cards])[0]["rows"]]
    assert reasons == ["no_such_package not installed", "needs 2 GPUs, none here"]
    assert run([fake], total_s=0.0)[0]["rows"][0]["left_out"] == "no time was left"


def test_tokens_may_differ_only_where_stock_hardly_preferred_its_own():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, pad_token_id=0, **sizes)).eval()
    ids = torch.arange(10, 16)[None]

    def call():
        with torch.no_grad():
            return model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)

    stock = call()
    with torch.no_grad():
        logits = model(stock[:, :-1]).logits[0, 7]  # of the third token that is written
    assert judge_outputs(stock, stock.clone(), torch.float32, model, call)["equal"] == stock.numel()
    other = stock.clone()
    other[0, 8] = logits.argmin()
    with pytest.raises(WrongResult, match="preferred"):
        judge_outputs(stock, other, torch.float32, model, call)
    head = model.get_output_embeddings().weight.data
    head[3] = head[int(stock[0, 8])]  # two tokens of equal logits: a tie
    stock = call()
    other = stock.clone()
    place = int((stock[0, 6:] == 3).nonzero()[0]) + 6
    other[0, place] = int(logits.argmax())
    assert judge_outputs(stock, other, torch.float32, model, call)["margin"] == pytest.approx(0.0, abs=1e-6)


def test_rows_of_other_scripts_stay_in_the_file_and_the_least_is_of_all(monkeypatch, tmp_path):
    first, _ = run([Fake(monkeypatch).script("first")])
    first["rows"][0]["ratio"] = 0.5
    second, _ = run([Fake(monkeypatch).script("second")])
    second["rows"][0]["ratio"] = 1.0  # what it was measured to be is chance
    path = tmp_path / "scripts.json"
    results.save_rows(first, path)
    results.save_rows(second, path)
    found = json.loads(path.read_text())
    assert [row["script"] for row in found["rows"]] == ["first", "second"]
    assert found["least"] == {"script": "first", "ratio": 0.5}
    assert [row["script"] for row in results.below(found["rows"])] == ["first"]
    results.save_rows(second | {"dtype": "other"}, path)
    assert len(json.loads(path.read_text())["rows"]) == 1
    assert "least 0.50x, first" in results.rows_table(found["rows"]).title


@pytest.mark.turns(2)
def test_the_plot(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    result, _ = run([Fake(monkeypatch).script(name) for name in ("one", "two")])
    plot.save_ratios(result, tmp_path / "images" / "scripts.png")
    assert (tmp_path / "images" / "scripts.png").stat().st_size > 5000


def test_names_may_be_how_names_begin():
    assert [script.name for script in find_scripts(["flux", "bert-"])] == ["flux", "bert-1", "bert-64"]
    assert len(find_scripts([])) == len(SCRIPTS)
    with pytest.raises(KeyError, match="nothing"):
        find_scripts(["nothing"])


SLOW = """
import pathlib, signal, sys, time
def end(*_):
    pathlib.Path(sys.argv[1]).write_text("told")
    sys.exit()
signal.signal(signal.SIGTERM, end)
time.sleep(60)
"""


@pytest.mark.turns(2)
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_process_that_takes_too_long_is_told_to_end(tmp_path, monkeypatch, interrupted):
    """And not killed: torchrun ends its ranks then. Nor waited for, where the user or a limit of time ends this one."""
    (tmp_path / "slow_to_end.py").write_text(SLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    ended = pytest.raises(TimeoutError if interrupted else RuntimeError, match="not done|slow_to_end .* more than 2 s")
    with ended, within(2.0 if interrupted else 60.0):
        spawn("slow_to_end", [str(tmp_path / "told")], None, None if interrupted else 2.0)
    assert (tmp_path / "told").read_text() == "told"
