"""`accel doctor`: without a GPU, and for cards of its files."""

import dataclasses
import json

import pytest
import torch
from accel_kernels import OPS, rms_norm
from accel_kernels.device import (
    Card,
    Feature,
    card,
    has,
    lacks,
    made_of,
    multiprocessors,
    present_card,
    read_card,
    replayed,
)

from accel.bench import doctor
from support.command_line import run_command
from support.kernels.cards import CARDS

GPU = torch.device("cuda", 0)


def written(path, known: Card):
    path.write_text(json.dumps({"card": known.to_dict()}))
    return path


def test_without_a_gpu_it_says_so(tmp_path):
    result = run_command("doctor", "--device", "cpu", "--out", tmp_path / "here.json")
    assert result.exit_code == 0, result.output
    assert "no GPU: accel runs plain torch" in result.output
    found = json.loads((tmp_path / "here.json").read_text())
    assert found["card"] is None and found["machine"]["torch"] == torch.__version__ and not found["kernels"]
    assert run_command("doctor", "--replay", tmp_path / "here.json").exit_code == 2  # of no card
    assert run_command("doctor", "--replay", tmp_path / "absent.json").exit_code == 2


def test_a_replay_says_what_the_card_lacks(tmp_path):
    small = next(one for one in CARDS if one.compute == (12, 0))
    out = ("--device", "cpu", "--out", tmp_path / "out.json")
    result = run_command("doctor", "--replay", written(tmp_path / "card.json", small), *out)
    assert result.exit_code == 0, result.output
    assert "as on sm_120: compute capability 12.0, 36 multiprocessors, 12.0 GB, 99 KB shared" in result.output
    assert "lacks tensor cores that read shared memory, products of warpgroups" in result.output


@pytest.mark.parametrize("known", CARDS, ids=lambda one: f"{one.name}-{one.memory // 10**9}")
@pytest.mark.share(1)
def test_a_file_makes_a_card(known, tmp_path):
    read = read_card(written(tmp_path / "card.json", known))
    assert read == known
    with replayed(read):
        assert card(GPU) == known and card(torch.device("cpu")).compute == (0, 0)
        assert (lacks(GPU, Feature.BFLOAT16) is None) == (known.compute >= (8, 0))
        assert has(GPU, Feature.TMA) == (known.compute >= (9, 0))
        assert has(GPU, Feature.WARPGROUPS) == (known.compute == (9, 0))
        assert has(GPU, Feature.SHARED_OPERANDS) == (known.compute in ((9, 0), (10, 0)))


def test_the_environment_limits_the_card(monkeypatch, tmp_path):
    given = {"name": "H200", "major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 10**11}
    given |= {"L2_cache_size": 1, "shared_memory_per_block_optin": 232448}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("", (), given))
    monkeypatch.delenv("TRITON_OVERRIDE_ARCH", raising=False)
    for wanted, compute, room in (("", (9, 0), 227), ("8.9", (8, 9), 99), ("7.5", (7, 5), 64), ("12.1", (12, 1), 99)):
        monkeypatch.setenv("ACCEL_CARD", wanted)
        present_card.cache_clear()
        found = present_card(GPU)
        assert (found.compute, found.shared_memory, found.processors) == (compute, room * 1024, 132)
    allowed = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: allowed.append(given))
    file = written(tmp_path / "card.json", CARDS[0])
    small = dataclasses.replace(CARDS[0], processors=28, memory=6 * 10**9, bus=0.5)
    for wanted, known in ((f"{file}", CARDS[0]), (f"{file},processors=28,memory=6GB,bus=0.5", small)):
        monkeypatch.setenv("ACCEL_CARD", wanted)
        present_card.cache_clear()
        assert present_card(GPU) == known and allowed.pop() == (known.memory / 10**11, 0)
    monkeypatch.setenv("ACCEL_CARD", "processors=36")
    present_card.cache_clear()
    assert (multiprocessors(GPU), card(GPU).compute) == (36, (9, 0)) and not allowed
    present_card.cache_clear()


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("absent.json", "absent.json"), ("8", "'8'"), ("8.9,processors=200", "processors=200 of 30"), ("bus=x", "'x'"),
        ("8.9,cores=3", "'cores'"), ("memory=infGB", "infinity"),
        ("memory=0", "memory=0 of 8000000000"), ("bus=nan", "bus=nan of 1.0"),
    ],
)  # fmt: skip
def test_what_is_no_card_is_told(wanted, told):
    with pytest.raises(ValueError, match="ACCEL_CARD='") as raised:
        made_of(CARDS[0], wanted)
    assert wanted in str(raised.value) and told in str(raised.value) and "processors=36" in str(raised.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"processors": 0}, {"processors": "28"}, {"shared_memory": None}, {"compute": [8]}, {"compute": [-1, 0]},
        {"memory": "12GB"}, {"bandwidth": float("nan")}, {"rate": -1}, {"bus": 0}, {"cores": 3}, 5,
        {"compute": [9.7, 0]}, {"processors": True}, {"name": []}, "[" * 100_000,
    ],
)  # fmt: skip
@pytest.mark.share(1)
def test_a_file_of_no_card_is_told(wrong, tmp_path):
    file = tmp_path / "card.json"
    whole = json.dumps({"card": CARDS[0].to_dict() | wrong if isinstance(wrong, dict) else wrong})
    file.write_text(wrong if isinstance(wrong, str) else whole)
    with pytest.raises(ValueError, match="card.json has no card: "):
        read_card(file)


def test_kernels_beside_their_references(monkeypatch):
    """In Triton's interpreter: one that agrees, one that does not, one that is refused, one that fails."""
    monkeypatch.setattr(doctor, "race", lambda runs: [0.5] * len(runs))
    here, case = torch.device("cpu"), doctor.cases_of(rms_norm)[0]
    assert all(doctor.cases_of(op) for op in OPS)
    row = doctor.examine_case(dataclasses.replace(rms_norm, kernel="accel_kernels.norm.rms_norm:reference"), case, here)
    assert row["outcome"] == "agrees" and row["us"] == row["reference_us"] == 500.0

    def short(*args, **more):
        raise torch.OutOfMemoryError

    def outcome(kernel, supports=lambda *_, **__: None):
        op = dataclasses.replace(rms_norm, supports=supports)
        vars(op)["triton"] = kernel
        return doctor.examine_case(op, case, here)["outcome"]

    assert outcome(lambda x, *_, **__: (1.1 * x, x)) == "differs"
    assert outcome(None, lambda *_, **__: "too wide") == "too wide"
    assert outcome(lambda *_, **__: 1 / 0).startswith("failed: ZeroDivisionError")
    assert outcome(short) == doctor.NO_MEMORY
