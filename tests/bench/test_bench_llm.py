"""`accel bench llm` and `accel profile`: sizes, bytes, what is timed, what happens where something goes wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, MixtralConfig
from typer.testing import CliRunner

import accel
from accel import api
from accel.bench import timing
from accel.bench.llm import cases, configs, models, profile, ready, runner
from accel.bench.llm import interleaved as turns
from accel.bench.llm import latency_spikes as stalls
from accel.bench.llm.traffic import Traffic, copy_bandwidth, layers_of
from accel.commands.app import app

EVERYTHING = bool(os.environ.get("ACCEL_TEST_EVERYTHING"))

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
PUBLISHED = {
    "llama-8b": 8030.3,
    "llama-3b": 3212.7,
    "llama-1b": 1235.8,
    "qwen-0.5b": 494.0,
    "qwen-7b": 7615.6,
    "qwen3-8b": 8190.7,
    "mistral-7b": 7248.0,
    "gemma2-2b": 2614.3,
    "phi3-mini": 3821.1,
    "gpt2": 124.4,
}


def command(*arguments):
    runs = CliRunner(env={"TERM": "dumb", "COLUMNS": "160"})
    return runs.invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny():
    return models.build("tiny", CPU, torch.float32)


@pytest.mark.parametrize("name", [name for name in configs.CONFIGS if name != "tiny"])
def test_real_models_are_the_published_sizes(name):
    """Built on the meta device, so that it costs nothing: the parameter counts everybody knows."""
    model = models.build(name, torch.device("meta"), torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(PUBLISHED[name], abs=0.1)


def test_it_never_ends_by_itself_but_looks_for_the_end(tiny):
    inputs = models.prompt(tiny, 1, 5)
    out = tiny.generate(**inputs, max_new_tokens=40, do_sample=True)
    assert out.shape == (1, 45) and tiny.generation_config.eos_token_id == 256


def test_stock_beside_it_is_over_the_same_weights(tiny):
    stock = models.beside(tiny)
    inputs = models.prompt(tiny, 2, 9)
    with torch.no_grad():
        wanted = stock(**inputs).logits
        accel.optimize(tiny)
        tiny(**inputs)
        pairs = zip(stock.parameters(), tiny.parameters(), strict=True)
        assert all(a is b and a.data_ptr() == b.data_ptr() for a, b in pairs)
        assert torch.equal(stock(**inputs).logits, wanted)
        assert torch.equal(accel.restore(tiny)(**inputs).logits, wanted)
    assert not any("forward" in vars(module) for module in stock.modules())


def test_an_assistant_is_a_small_one_of_the_same_make(tiny):
    tiny.config.num_hidden_layers = 2
    helper = models.assistant(tiny, layers=1)
    assert len(layers_of(helper)) == 1 and helper.dtype == tiny.dtype
    tiny.generate(**models.prompt(tiny, 1, 6), max_new_tokens=5, do_sample=False, assistant_model=helper)


def test_bytes_of_a_step_by_hand(tiny):
    traffic = Traffic.of(tiny)
    hidden, inner, kv, vocabulary, layers = 32, 64, 16, 256, 2
    assert traffic.weights == {
        "QKV": 4 * layers * hidden * (hidden + 2 * kv),
        "out": 4 * layers * hidden * hidden,
        "gate and up": 4 * layers * 2 * hidden * inner,
        "down": 4 * layers * hidden * inner,
        "head": 4 * vocabulary * hidden,
        "norms and rest": 4 * (2 * layers + 1) * hidden,
    }
    assert traffic.cache(3, 100) == 4 * 3 * 100 * layers * 2 * kv
    assert traffic.step_bytes(3, 100) == sum(traffic.weights.values()) + traffic.cache(3, 100)
    assert traffic.step(3, 100)["attention"] == traffic.cache(3, 100)


def test_bytes_of_other_makes():
    def traffic(config):
        model = AutoModelForCausalLM.from_config(config).eval()
        return model, Traffic.of(model)

    sizes = {"vocab_size": 61, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model, found = traffic(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=2, **tokens))
    whole = sum(p.nbytes for p in model.parameters())
    assert sum(found.weights.values()) == whole - model.transformer.wpe.weight.nbytes  # the head is the table, tied
    more = {"intermediate_size": 48, "num_key_value_heads": 1}
    _, found = traffic(Gemma2Config(**sizes, **more, **tokens, head_dim=16, sliding_window=8))
    each = 4 * 2 * 16
    assert found.cache(1, 100) == each * (8 + 100)  # every second layer sees a window
    _, found = traffic(MixtralConfig(**sizes, **more, **tokens, num_local_experts=4, num_experts_per_tok=1))
    experts = found.weights["experts"]
    assert found.step(1, 1)["experts"] == experts // 4
    assert experts * 0.6 < found.step(4, 1)["experts"] < experts * 0.7  # 1 - (3/4)^4


def test_a_step_is_the_difference_of_two_calls(tiny, monkeypatch):
    """A model whose calls cost 30 ms, and 1 ms a token."""
    work = cases.Work(tiny, Traffic.of(tiny), copy_bandwidth(CPU), CPU, (2,), (16,), 40, 0)
    now = [0.0]
    for module in (turns, timing):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def generate(input_ids, attention_mask, max_new_tokens, do_sample):
        now[0] += 0.03 + 0.001 * max_new_tokens
        return torch.zeros(input_ids.shape[0], input_ids.shape[1] + max_new_tokens)

    (case,) = cases.decode(work)
    variant = turns.Variant("slow", SimpleNamespace(generate=generate))
    found = turns.interleaved(case, [variant], CPU, 0.3, lambda name, error: pytest.fail(str(error)))["slow"]
    assert found["ms_step"] == pytest.approx(1.0)
    assert found["tok_s"] == pytest.approx(2e3 / found["ms_step"], rel=1e-2)
    assert found["call_ms"] == pytest.approx(30 + 45) and found["first_s"] > 0.03 and found["rounds"] >= 2


def test_stopping_early_is_no_time():
    generate = SimpleNamespace(generate=lambda input_ids, **kwargs: torch.zeros(1, 9))
    with pytest.raises(ValueError, match="stopped after 5 of 7 tokens"):
        turns.Variant("short", generate).generate({"input_ids": torch.zeros(1, 4)}, 7)


@pytest.mark.parametrize("failing", ["prepare", "first", "later"])
def test_one_that_fails_leaves_the_others(failing):
    calls = []

    def prepare(variant):
        def sample():
            calls.append(variant.name)
            if variant.name == "bad" and failing != "prepare" and (failing == "first" or calls.count("bad") > 2):
                raise RuntimeError("too bad")
            return {"x": float(len(calls))}

        if variant.name == "bad" and failing == "prepare":
            raise RuntimeError("too bad")
        return sample

    failures = []
    case = turns.TimedCase("part", {"batch": 1}, prepare, lambda median, variant: median)
    variants = [turns.Variant("bad", None), turns.Variant("good", None)]
    found = turns.interleaved(case, variants, CPU, 0.01, lambda name, error: failures.append((name, str(error))))
    assert list(found) == ["good"] and failures == [("bad", "too bad")]
    assert found["good"]["rounds"] >= turns.LEAST_ROUNDS


def bench(tmp_path, *arguments):
    sizes = ("--batch", "1,3", "--new-tokens", "3", "--device", "cpu", "--out", tmp_path)
    return command("bench", "llm", "--model", "tiny", *sizes, *arguments)


def test_a_whole_run(tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "PROMPTS", (64,))
    monkeypatch.setattr(turns, "MOST_ROUNDS", 2)
    monkeypatch.setattr(stalls, "CALLS", ((1, 7, 4), (3, 20, 4), (1, 2040, 40)))
    parts = ",".join(part for part in runner.PARTS if part != "ready")
    result = bench(
        tmp_path, "--context", "32,2100,64", "--long", "150", "--long-batch", "1,2", "--parts", parts, "--compile"
    )
    assert result.exit_code == 0, result.output
    assert all(word in result.output for word in ("decode", "prefill", "speed-up", "first or second call", "of bound"))
    figures = json.loads((tmp_path / "cpu-llm-tiny.json").read_text())
    assert figures["case"] == "llm-tiny" and figures["dtype"] == "float32" and figures["machine"]["gpu"] is None
    assert {"commit", "date", "sites", "graphs", "fallbacks", "copy_bandwidth_gb_s"} <= set(figures)
    assert figures["quality"]["passed"] and figures["quality"]["agreement"]["tokens"] == 32
    assert figures["restored_bit_equal"] is True and figures["sizes"]["parameters"] == 34976

    parts = figures["parts"]
    decode = parts["decode"]
    assert [(row["batch"], row["context"]) for row in decode] == [(1, 32), (3, 32), (1, 2100), (1, 64)]
    assert [set(row) & {"stock", "accel", "compile"} for row in decode] == [
        {"stock", "accel", "compile"}, {"stock", "accel", "compile"}, set(), {"stock", "accel"}
    ]  # fmt: skip
    for row in (*decode[:2], decode[3], *parts["long"]):
        assert row["accel"]["tok_s"] > 0 and 0 < row["accel"]["share_of_bandwidth"] < 1
    assert [row["tokens"] for row in parts["prefill"]] == [64]
    assert [row["mode"] for row in parts["modes"]] == list(cases.MODES)
    assert all({"stock", "accel"} <= set(row) for row in parts["modes"])
    assert [(row["batch"], row["context"]) for row in parts["long"]] == [(1, 150), (2, 150)]
    assert [row["batch"] for row in parts["memory"]] == [1, 3] and parts["memory"][0]["accel"] is None
    assert [row["variant"] for row in parts["stalls"]] == ["stock", "accel"]
    assert all([call["context"] for call in row["calls"]] == [7, 20] for row in parts["stalls"])

    assert {(row["case"], row["variant"]) for row in figures["failed"]} == {
        ("batch 1, context 2100, new tokens 3", "stock"), ("batch 1, context 2100, new tokens 3", "accel")
    }  # fmt: skip
    assert all("2048 positions" in row["reason"] for row in figures["failed"]) and "failed: decode" in result.output
    assert figures["skipped"] == []


def test_quantized_weights_beside(tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "PROMPTS", (64,))
    monkeypatch.setattr(turns, "MOST_ROUNDS", 2)
    steps = cases.Work.steps  # on a busy host the difference of two calls may come out below zero
    monkeypatch.setattr(cases.Work, "steps", lambda *args, **options: steps(*args, **options) | {"step": 1e-5})
    more = ("--context", "32", "--parts", "decode,prefill", "--weights", "int8,int8-head,int4-g32")
    more += ("--activations", "int8")
    result = bench(tmp_path, *more)
    assert result.exit_code == 0, result.output
    assert "s to quantize" in result.output and "accel int8" in result.output
    figures = json.loads((tmp_path / "cpu-quantized-tiny.json").read_text())
    for row in (*figures["parts"]["decode"], *figures["parts"]["prefill"]):
        assert {"stock", "accel", "accel int8", "accel int8-head", "accel int4-g32", "accel int8 x int8"} <= set(row)
    told = figures["quantized"]
    assert told["int8"]["mb"] < told["int8"]["mb_before"] / 2 and told["int4-g32"]["mb"] < told["int8"]["mb"]
    assert 30 < told["int8"]["sqnr_db"] and 10 < told["int4-g32"]["sqnr_db"] < told["int8"]["sqnr_db"]
    assert 0 < told["int8"]["kl"] < told["int4-g32"]["kl"] and 0.9 < told["int8"]["top1"] <= 1
    assert told["int8"]["kl"] < told["int8 x int8"]["kl"] and told["int8 x int8"]["mb"] == told["int8"]["mb"]
    row = figures["parts"]["decode"][0]  # at one time a step, the shares are as the bytes
    shares = {name: of["share_of_bandwidth"] for name, of in row.items() if isinstance(of, dict)}
    assert 0 < shares["accel int4-g32"] < shares["accel int8"] < shares["accel"] == shares["stock"]
    assert 0 < shares["accel int8-head"] < shares["accel int8"] == shares["accel int8 x int8"]


def test_rounded_caches_beside(tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "MOST_ROUNDS", 2)
    more = ("--context", "32", "--parts", "decode", "--weights", "int8", "--kv-cache", "int8")
    result = bench(tmp_path, *more)
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "cpu-quantized-tiny.json").read_text())
    names = ["int8", "kv int8", "int8, kv int8"]
    assert list(figures["quantized"]) == names and "int8, kv int8" in result.output
    told = figures["quantized"]["kv int8"]  # two layers, two heads of 8: a byte each and a float32 for all, not 4 each
    assert (told["token_bytes"], told["token_bytes_before"]) == (2 * 2 * 2 * 12, 2 * 2 * 2 * 32)
    assert 0 < told["kl"] < 1e-3 and "mb" not in told
    assert all(f"accel {name}" in row for name in names for row in figures["parts"]["decode"])


def test_a_step_reads_less_of_a_rounded_cache(tiny):
    traffic = Traffic.of(tiny)
    work = cases.Work(tiny, traffic, 1e9, CPU, (1,), (64,), 8, 64)
    shares = [
        work.rate(4, 64, {"step": 1e-3, "call": 1e-3}, turns.Variant("", tiny, kept=kept))["share_of_bandwidth"]
        for kept in (1.0, 0.375)
    ]
    cache = traffic.cache(4, 64 + (work.few + work.many) // 2)
    assert shares[0] - shares[1] == pytest.approx(0.625 * cache / 1e9 / 1e-3, abs=2e-4)


def test_out_of_time_nothing_new_is_begun(tmp_path):
    result = bench(tmp_path, "--context", "32", "--seconds", "0.1")
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "cpu-llm-tiny.json").read_text())
    assert figures["parts"] == {} and figures["quality"]["passed"]
    assert [row["part"] for row in figures["skipped"]] == list(runner.PARTS)
    assert "left out: decode" in result.output


def test_an_interrupted_run_gives_what_it_had(tmp_path, monkeypatch):
    def interrupted(work):
        raise KeyboardInterrupt

    monkeypatch.setitem(runner.IN_TURNS, "prefill", interrupted)
    result = bench(tmp_path, "--context", "32", "--parts", "decode,prefill,modes,ready")
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "cpu-llm-tiny.json").read_text())
    assert list(figures["parts"]) == ["decode"] and figures["sites"]
    assert figures["skipped"] == [{"part": "ready", "case": "", "reason": "interrupted"}]


def test_a_run_that_is_killed_leaves_what_it_had(tmp_path, monkeypatch):
    """A limit of time ends a process without asking; here an exception that nothing waits for does."""

    class Killed(BaseException):
        pass

    def killed(work):
        raise Killed

    monkeypatch.setitem(runner.IN_TURNS, "prefill", killed)
    with pytest.raises(Killed):
        bench(tmp_path, "--context", "32", "--parts", "decode,prefill", "--weights", "int8,int4")
    figures = json.loads((tmp_path / "cpu-quantized-tiny.json").read_text())
    row, _ = figures["parts"]["decode"]
    assert {"stock", "accel", "accel int8"} <= set(row) and list(figures["quantized"]) == ["int8"]
    (failed,) = figures["failed"]  # 32 inputs are no multiple of 128
    assert (failed["part"], failed["variant"]) == ("quantizing", "int4") and "no linear layer" in failed["reason"]


def test_parts_keep_time_for_those_after_them():
    request = runner.BenchRequest("tiny", CPU, torch.float32, parts=("decode", "stalls", "ready"))
    going = runner.BenchRun(request, turns.Clock(100.0))
    going.clock.start -= 79
    assert not going.out_of_time("decode")
    going.clock.start -= 2
    assert going.out_of_time("decode") and not going.out_of_time("stalls") and not going.out_of_time("ready")
    going.clock.start -= 10
    assert going.out_of_time("stalls") and not going.out_of_time("ready")


def test_no_figure_for_a_wrong_result(tmp_path, monkeypatch):
    plan = api._plan

    def wrong(part, context):
        made = plan(part, context)
        if not made.patches:
            made.patches = []
        made.apply = lambda: setattr(
            part.lm_head, "forward", lambda x: 1.01 * torch.nn.functional.linear(x, part.lm_head.weight)
        )
        made.undo = lambda: vars(part.lm_head).pop("forward", None)
        return made

    monkeypatch.setattr(api, "_plan", wrong)
    result = bench(tmp_path, "--context", "32")
    assert result.exit_code == 1 and "wrong result" in result.output and "nothing was timed" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--model", "llama-9b"), "'llama-9b' is neither a folder nor one of llama-8b"),
        (("--model", "tiny", "--parts", "decode,encode"), "'encode' is none of decode"),
        (("--model", "tiny", "--batch", "1,x"), "give numbers with commas"),
        (("--model", "tiny", "--weights", "int8,int3"), "'int3' is none of int8"),
        (("--model", "tiny", "--kv-cache", "int4"), "'int4' is none of int8, fp8"),
        (("--model", "tiny", "--activations", "int4"), "'int4' is none of int8"),
        (("--model", ROOT / "examples/models/tiny-sd-digits/text_encoder"), "no causal language model"),
    ],
    ids=str,
)
def test_it_refuses(arguments, message, tmp_path):
    result = command("bench", "llm", *arguments, "--device", "cpu", "--out", tmp_path)
    assert result.exit_code == 2 and message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.skipif(not EVERYTHING, reason="seconds of work; ACCEL_TEST_EVERYTHING=1 runs it")
def test_ready_in_this_process_and_in_a_fresh_one():
    here = ready.measure_generation("tiny", CPU, torch.float32, "accel", 16)
    assert here["optimize_s"] > 0 and here["ready_s"] >= 0
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    given = ["-m", "accel.bench.llm.ready", "tiny", "cpu", "float32", "stock", "16"]
    done = subprocess.run(
        [sys.executable, *given], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) == set(here)


@pytest.mark.parametrize("more", [(), ("--stock",)], ids=["accel", "stock"])
def test_a_profile(more):
    result = command("profile", "tiny", "--context", "32", "--device", "cpu", "--json", *more)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout[result.stdout.index("{") :])
    rows = {row["part"]: row for row in figures["rows"]}
    assert list(rows) == ["QKV", "attention", "out", "gate and up", "down", "head", "norms and rest"]
    assert all(row["ms"] > 0 and row["launches"] > 0 for row in rows.values())
    assert rows["head"]["mb"] == pytest.approx(256 * 32 * 4 / 1e6, abs=1e-3)
    least = sum(row["least_ms"] for row in rows.values())
    assert figures["bound_ms"] == pytest.approx(least, rel=0.05, abs=1e-3)
    assert figures["step_ms"] > 0 and figures["kernels"][0]["us"] >= figures["kernels"][-1]["us"]


def test_a_profile_as_tables():
    result = command("profile", "tiny", "--context", "8", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert all(word in result.output for word in ("gate and up", "of its ms", "under generate()", "aten::"))
    assert command("profile", "nothing-here", "--device", "cpu").exit_code == 2


def on_gpu(name, start, end):
    return SimpleNamespace(name=name, device_type=DeviceType.CUDA, time_range=SimpleNamespace(start=start, end=end))


def test_launches_take_the_role_of_the_marks_they_lie_between():
    mark = "at::cuda::(anonymous namespace)::spin_kernel(long)"
    names = ["fill", mark, "gemv", "reduce", mark, "copy", mark, "gemv", mark]
    events = [on_gpu(name, 10 * at, 10 * at + at) for at, name in enumerate(names)]
    events = [*events[::-1], on_gpu("accel: QKV", 0, 99), SimpleNamespace(name="x", device_type=DeviceType.CPU)]
    found = profile._on_gpu(events, ["QKV", "down"])
    assert [(kernel.name, kernel.us, kernel.role) for kernel in found] == [
        ("fill", 0, None), ("gemv", 2, "QKV"), ("reduce", 3, "QKV"), ("copy", 5, None), ("gemv", 7, "down")
    ]  # fmt: skip
    assert {kernel.role for kernel in profile._on_gpu(events, ["QKV"])} == {None}


def test_a_graphs_launches_take_the_roles_of_the_same_ones_outside():
    def kernels(*pairs):
        return [profile.Kernel(name, 1.0, role) for name, role in pairs]

    known = kernels(("gemv", "QKV"), ("paged_attention", "attention"), ("gemv", "out"), ("copy", None), ("mm", "head"))
    replayed = kernels(
        ("gemv", None), ("paged_attention", None), ("gemv", None), ("mm", None), ("mm", None), ("new", None)
    )
    roles = [kernel.role for kernel in profile._assigned(replayed, known)]
    assert roles == ["QKV", "attention", "out", "head", "head", None]


def test_the_plot(tmp_path):
    pytest.importorskip("matplotlib")

    def figures(ms, rows=1):
        return {"ms_step": ms, "tok_s": rows * 1e3 / ms, "share_of_bandwidth": 3.5 / ms}

    result = {
        "case": "llm-llama-8b", "machine": {"gpu": "NVIDIA H200"}, "dtype": "bfloat16", "sizes": {"parameters": 8e9},
        "parts": {
            "decode": [
                {"batch": 1, "context": 512, "stock": figures(20.0), "accel": figures(4.0), "compile": figures(7.0)},
                {"batch": 8, "context": 512, "stock": figures(21.0, 8), "accel": figures(4.5, 8)},
                {"batch": 1, "context": 8192, "stock": figures(22.0)},
            ],
            "long": [{"context": 32768, "stock": figures(27.0), "accel": figures(6.0)}],
        },
    }  # fmt: skip
    (tmp_path / "nvidia-h200-llm-llama-8b.json").write_text(json.dumps(result))
    given = [ROOT / "benchmarks" / "plot.py", "--results", tmp_path, "--out", tmp_path / "images" / "speed.png"]
    done = subprocess.run([sys.executable, *map(str, given)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    drawn = (tmp_path / "images" / "decode.png").read_bytes()
    assert len(drawn) > 10_000
    (tmp_path / "nvidia-h200-llm-llama-8b-2.json").write_text(json.dumps(result))  # the same on another host
    subprocess.run([sys.executable, *map(str, given)], check=True)
    assert (tmp_path / "images" / "decode.png").read_bytes() == drawn


def test_the_plot_of_quantized_models(tmp_path):
    pytest.importorskip("matplotlib")
    gpu = {"machine": {"gpu": "NVIDIA H200"}}
    decode = [
        {"batch": rows, "context": 512} | {name: {"ms_step": ms, "tok_s": rows * 1e3 / ms} for name, ms in times}
        for rows, times in (
            (1, (("stock", 20.0), ("accel int4", 2.0), ("accel int4, kv int8", 1.9))),
            (8, (("stock", 21.0),)),
        )
    ]
    ways = [("int8", "rtn", None, 0.5, 1e-4), ("int4", "gptq", None, 0.26, 6e-3), ("int8", "rtn", "int8", 0.5, 7e-2)]
    keys = ("weights", "method", "inputs", "bytes_of_16_bits", "change")
    quality = [{"model": "as trained", "kv_cache": None} | dict(zip(keys, way, strict=True)) for way in ways]
    quality.append(quality[0] | {"weights": None, "kv_cache": "fp8"})
    results = {
        "quantized-llama-8b": {"parts": {"decode": decode}},
        "quantized-chain": {"rows": []},
        "peers-llama-8b": {"decode": decode[:1], "compiled": {"stock": {"ms_step": 9.0}}},
        "quality-lm": {"rows": quality, "parameters": 98e6},
    }
    for case, result in results.items():
        (tmp_path / f"nvidia-h200-{case}.json").write_text(json.dumps({"case": case} | gpu | result))
    given = [ROOT / "benchmarks" / "plot.py", "--results", tmp_path, "--out", tmp_path / "images" / "speed.png"]
    done = subprocess.run([sys.executable, *map(str, given)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["quantized.png"]
    assert (tmp_path / "images" / "quantized.png").stat().st_size > 20_000
