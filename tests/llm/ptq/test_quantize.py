"""accel.quantize: what it leaves in place, what it refuses before anything changes, and going on where it stopped."""

import copy
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM

import accel
from accel.llm.ptq import run as running
from accel.llm.ptq.calibrate import LayerResult
from accel.llm.ptq.calibration.batches import batches, windows
from accel.quantization.module import QuantizedLinear
from support.llm.calls import tokenizer
from support.llm.families import BY_NAME, EVERYTHING, FAMILIES, available, layers, make, padded
from support.llm.outputs import generate, same
from support.llm.quantized import held_by, logits

IDS = [torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
TEXTS = ["abcdef", "hello there", "once more"]


def by_option(name: str, scheme: str):
    """What accel.optimize makes of it with this option, for good."""
    model = accel.optimize(make(name), weights=scheme, keep_original=False)
    with pytest.warns(UserWarning):
        return accel.restore(model)


@pytest.fixture
def method_with_data(monkeypatch):
    """Stands for a calibrated method: it notes what it is given and rounds as "rtn" does."""
    seen = []
    real = running.quantize_layers

    def quantize_layers(model, scheme, method, batches, known, device):
        seen.append((method, batches, dict(known)))
        return real(model, scheme, "rtn", [], known)

    monkeypatch.setattr(running, "quantize_layers", quantize_layers)
    return seen


@pytest.fixture
def interrupted(monkeypatch):
    """interrupted(n): the n-th layer is never done."""

    def after(count: int):
        real = running.quantize_layers

        def quantize_layers(*given):
            for number, result in enumerate(real(*given)):
                if number == count:
                    raise KeyboardInterrupt
                yield result

        monkeypatch.setattr(running, "quantize_layers", quantize_layers)

    yield after


@pytest.mark.parametrize("scheme", ["int8", "int4-g32-asym", "fp8"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-biases", "gpt2", "falcon-grouped", "mixtral", "mpt"])
@pytest.mark.share(2)
def test_it_is_what_the_option_makes_and_stays(name, scheme):
    model, wanted = make(name), by_option(name, scheme)
    assert accel.quantize(model, scheme) is model
    assert len(held_by(model)) == len(held_by(wanted)) > 0
    assert torch.equal(logits(model)["logits"], logits(wanted)["logits"])
    ids, mask = padded((9, 9))
    before = generate(model, ids, mask)
    accel.optimize(model)
    same(generate(model, ids, mask), before)
    accel.restore(model)
    assert held_by(model) and torch.equal(logits(model)["logits"], logits(wanted)["logits"])


FAST = [family for family in FAMILIES if family.expected == "fast"]


# All of them with weights quantized by the option: test_quantized_weights.py.
@pytest.mark.parametrize(
    "name", [family.name for number, family in enumerate(FAST) if EVERYTHING or family.core or number % 3 == 0]
)
@pytest.mark.share(2)
def test_every_family_that_is_fast_is_so_with_quantized_weights_of_its_own(name):
    if not available(BY_NAME[name].kind):
        pytest.skip(f"this transformers has no {BY_NAME[name].kind}")
    model = accel.quantize(make(name), "int8")
    ids, mask = padded((9, 9))
    before = generate(model, ids, mask)
    accel.optimize(model)
    rows = {path: (status, reason) for path, rule, status, reason in accel.report(model).sites if rule[0] in "ld"}
    assert {rows[path][0] for path in layers(model)} == {"patched"}, rows
    same(generate(model, ids, mask), before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_it_can_be_copied_and_each_copy_saved(copied, tmp_path):
    model = accel.quantize(make("llama"), "int8")
    other = copied(model)
    other.lm_head.weight.data.zero_()
    other.save_pretrained(tmp_path)
    assert not AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight.any()


def test_out_holds_the_model_and_its_tokenizer(tmp_path):
    model = accel.quantize(make("llama"), "int8", out=tmp_path / "out", tokenizer=tokenizer())
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja",
    }  # fmt: skip
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded)["logits"], logits(model)["logits"])


# -- interrupted and gone on with --------------------------------------------------------------------------------------


METHODS = [("rtn", "int8"), ("rtn", "fp8"), ("gptq", "int4-g32-asym"), ("awq", "int4-g32"), ("smoothquant", "int8")]


@pytest.mark.parametrize(
    ("method", "scheme", "done"),
    [(*how, done) for how in METHODS for done in (1, 2) if EVERYTHING or done == 1 or how[0] == "smoothquant"],
)
def test_a_second_run_goes_on(done, method, scheme, tmp_path, interrupted, monkeypatch, tiny):
    out, model = tmp_path / "out", make("llama", num_hidden_layers=3)
    data = None if method == "rtn" else IDS
    before = tiny.snapshot(model)
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    interrupted(done)
    with pytest.raises(KeyboardInterrupt):
        accel.quantize(model, scheme, data, method=method, out=out)
    monkeypatch.undo()
    assert before.keys() == tiny.snapshot(model).keys() and not held_by(model)
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())
    written = sorted(path.name for path in (out / "unfinished").iterdir())
    assert written == [f"model.layers.{number}.safetensors" for number in range(done)] + ["run.json"]
    known = []
    real = running.quantize_layers

    def quantize_layers(*given):
        known.extend(given[4])
        return real(*given)

    monkeypatch.setattr(running, "quantize_layers", quantize_layers)
    accel.quantize(model, scheme, data, method=method, out=out)
    assert known == [f"model.layers.{number}" for number in range(done)]
    assert not (out / "unfinished").exists()
    whole = accel.quantize(make("llama", num_hidden_layers=3), scheme, data, method=method)
    assert torch.equal(logits(model)["logits"], logits(whole)["logits"])
    assert torch.equal(logits(accel.load(out))["logits"], logits(whole)["logits"])


@pytest.fixture
def stopped(tmp_path, interrupted, method_with_data):
    """A folder with an interrupted run of a llama with method gptq."""
    interrupted(1)
    with pytest.raises(KeyboardInterrupt):
        accel.quantize(make("llama"), "int8", IDS, method="gptq", out=tmp_path / "out")
    return tmp_path / "out"


def test_another_run_is_refused_and_the_difference_named(stopped, tiny):
    other = make("llama")
    other.model.layers[1].mlp.up_proj.weight.data += 1e-3
    one_token_changed = IDS[2].clone()
    one_token_changed[1, 11] += 1
    others = [
        (make("llama"), "int4-g32", IDS, "gptq", "another scheme: int8, now int4-g32"),
        (make("llama"), "int8", IDS[:2], "gptq", "another calibration: "),
        (make("llama"), "int8", [IDS[0], IDS[1], one_token_changed], "gptq", "another calibration: "),
        (make("llama"), "int8", [IDS[1], IDS[0], IDS[2]], "gptq", "another calibration: "),
        (make("llama"), "int8", IDS, "awq", "another method: gptq, now awq"),
        (other, "int8", IDS, "gptq", "another model: "),
        (make("llama", rms_norm_eps=1e-3), "int8", IDS, "gptq", "another model: "),
    ]
    written = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    for model, scheme, data, method, message in others:
        before = tiny.snapshot(model)
        with pytest.raises(ValueError, match=message):
            accel.quantize(model, scheme, data, method=method, out=stopped)
        tiny.assert_same_state(before, tiny.snapshot(model))
    assert written == {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}


@pytest.mark.parametrize("damage", ["truncated", "foreign", "another shape", "garbled run"])
def test_damaged_layers_are_named_before_anything_changes(damage, stopped, tiny):
    from safetensors.torch import load_file, save_file

    file = stopped / "unfinished" / "model.layers.0.safetensors"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "foreign":
        save_file({"weights/model.layers.0.mlp.up_proj/data": torch.ones(2, 2)}, file)
    elif damage == "another shape":
        tensors = load_file(file)
        name = "weights/model.layers.0.mlp.up_proj/"
        tensors |= {name + "data": tensors[name + "data"][:8].clone(), name + "scales": tensors[name + "scales"][:8]}
        save_file(tensors, file)
    else:
        (stopped / "unfinished" / "run.json").write_text("[")
    model = make("llama")
    before = tiny.snapshot(model)
    message = {
        "truncated": r"model.layers.0.safetensors is damaged .*delete it",
        "foreign": r"model.layers.0.safetensors is no layer of a run",
        "another shape": r"mlp.up_proj is \(96, 64\) in the model and \(8, 64\) in the result",
        "garbled run": r"run.json is damaged; delete the folder",
    }[damage]
    with pytest.raises(ValueError, match=message):
        accel.quantize(model, "int8", IDS, method="gptq", out=stopped)
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    model = make("llama")
    with pytest.raises(ValueError, match="full is not empty and holds no interrupted run"):
        accel.quantize(model, "int8", out=tmp_path / "full")
    with pytest.raises(ValueError, match="file is a file, not a folder"):
        accel.quantize(model, "int8", out=tmp_path / "file")
    assert not held_by(model) and [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]
    accel.quantize(model, "int8", out=tmp_path / "out")
    with pytest.raises(ValueError, match="out is not empty"):  # a finished run is no interrupted one
        accel.quantize(make("llama"), "int8", out=tmp_path / "out")


def test_a_save_that_fails_is_gone_on_with(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("No space left on device")

    with monkeypatch.context() as patches:
        patches.setattr(running.SaveOverride, "__call__", full)
        with pytest.raises(OSError, match="No space"):
            accel.quantize(make("llama"), "int8", out=tmp_path)
    monkeypatch.setattr(running, "_linears", lambda results: pytest.fail() if len(results) < 2 else 14)
    model = accel.quantize(make("llama"), "int8", out=tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path))["logits"], logits(model)["logits"])


# -- what is refused ---------------------------------------------------------------------------------------------------


WRONG = {
    "scheme='int5' is not one of 'int8'": ("int5", None, None),
    "scheme=None is not one of": (None, None, None),
    "method='best' is not one of 'rtn', 'gptq', 'awq', 'smoothquant'": ("int8", IDS, "best"),
    "method='gptq' looks at calibration data": ("int8", None, "gptq"),
    "calibration holds texts: give their tokenizer": ("int8", TEXTS, None),
    "calibration holds no tokens": ("int8", [], None),
    "calibration is a str; give a list of texts": ("int8", "file.txt", None),
    "calibration is a int": ("int8", 7, None),
    "item 1 holds 'label', 'words'": ("int8", [IDS[0], {"label": 1, "words": "a"}], None),
    "input_ids of item 0 is no": ("int8", [torch.rand(2, 3)], None),
    "item 0 holds tokens outside the vocabulary of 99": ("int8", [torch.tensor([[1, 99]])], None),
    "input_ids of item 2 is no": ("int8", [IDS[0], IDS[1], ["a", "b"]], None),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_wrong_is_named_before_anything_changes(message, tiny, tmp_path):
    scheme, data, method = WRONG[message]
    model = make("llama")
    before = tiny.snapshot(model)
    with pytest.raises((ValueError, TypeError), match=message):
        accel.quantize(model, scheme, data, method=method, out=tmp_path / "out")
    tiny.assert_same_state(before, tiny.snapshot(model))
    assert not (tmp_path / "out").exists()


def test_groups_that_fit_nowhere_are_an_error_and_others_are_left_alone():
    model = make("llama")  # of 64 and 96 inputs
    with pytest.raises(ValueError, match=r"nothing to quantize as 'int4': model.layers.0.self_attn.q_proj: 64 inputs"):
        accel.quantize(model, "int4")
    assert not held_by(model)
    accel.quantize(model, "int4-g64")
    kinds = {type(layer.mlp.down_proj) for layer in layers(model).values()}
    assert kinds == {torch.nn.Linear} and len(held_by(model)) == 12
    with pytest.raises(ValueError, match=r"nothing to quantize as 'int8'"):
        accel.quantize(accel.quantize(make("llama"), "int8"), "int8")


def test_no_number_in_a_weight(tiny):
    model = make("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = float("nan")
    with pytest.raises(ValueError, match="model.layers.1.mlp.up_proj: NaN or Inf"):
        accel.quantize(model, "int8")
    assert not held_by(model) and "save_pretrained" not in vars(model)


def test_objects_that_are_no_language_models_and_optimized_ones(tiny):
    with pytest.raises(TypeError, match="causal language model of transformers, not a UNet2DConditionModel"):
        accel.quantize(tiny.unet(), "int8")
    model = accel.optimize(make("llama"))
    with pytest.raises(ValueError, match="call accel.restore"):
        accel.quantize(model, "int8")
    accel.quantize(accel.restore(model), "int8")
    with torch.device("meta"):
        empty = make("llama")
    with pytest.raises(ValueError, match="not loaded"):
        accel.quantize(empty, "int8")


def test_with_adapters_in_it_nothing_is_saved(tmp_path):
    peft = pytest.importorskip("peft")
    model = make("llama")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="a model with adapters in it cannot be saved"):
        accel.quantize(model, "int8", out=tmp_path / "out")
    assert not held_by(model) and not (tmp_path / "out").exists()
    assert len(held_by(accel.quantize(model, "int8"))) == 14


def test_results_that_are_not_of_the_model(monkeypatch):
    model = make("llama")
    real = running.quantize_layers

    def answered(change):
        monkeypatch.setattr(running, "quantize_layers", lambda *given: map(change, real(*given)))
        accel.quantize(model, "int8")

    with pytest.raises(ValueError, match="gave no weight for model.layers.0.mlp.down_proj"):
        answered(lambda result: result._replace(weights={}))
    with pytest.raises(ValueError, match=r"norm.weight of shape \(3,\) is no parameter"):
        answered(lambda result: result._replace(changed={"model.norm.weight": torch.ones(3)}))
    assert not held_by(model)


# -- data --------------------------------------------------------------------------------------------------------------


def test_every_kind_of_data_is_the_same_batches(method_with_data):
    from torch.utils.data import DataLoader

    model, words = make("llama"), tokenizer()
    texts = [{"input_ids": words(text)["input_ids"]} for text in TEXTS]
    kinds = [TEXTS, iter(TEXTS), tuple(TEXTS), [{"text": text, "label": 0} for text in TEXTS], texts]
    kinds += [[words(text, return_tensors="pt") for text in TEXTS], [row["input_ids"] for row in texts]]
    kinds += [DataLoader([{"input_ids": torch.tensor(row["input_ids"])} for row in texts])]
    found = [batches(model, kind, words) for kind in kinds]
    for batch in zip(*found, strict=True):
        assert all(torch.equal(one["input_ids"], batch[0]["input_ids"]) for one in batch)
        assert all(one["input_ids"].dtype == torch.int64 and one["input_ids"].dim() == 2 for one in batch)
    accel.quantize(model, "int8", TEXTS, tokenizer=words)
    method, given, known = method_with_data[0]
    assert method == "gptq" and len(given) == 3 and known == {}


def test_rows_as_long_come_together_padded_ones_alone(monkeypatch):
    monkeypatch.setattr("accel.llm.ptq.calibration.batches.TOGETHER", 20)
    model = make("llama")
    rows = [torch.full((1, length), number) for number, length in enumerate((5, 5, 5, 5, 5, 7, 5, 5))]
    padded = {"input_ids": rows[6], "attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}
    whole = {"input_ids": rows[7], "attention_mask": torch.ones(1, 5, dtype=torch.long)}
    found = batches(model, [*rows[:6], padded, whole, rows[7]], None)
    assert [batch["input_ids"][:, 0].tolist() for batch in found] == [[0, 1, 2, 3], [4], [5], [6], [7, 7]]
    assert ["attention_mask" in batch for batch in found] == [False, False, False, True, False]


def test_rows_and_tokens_are_bounded():
    model, words = make("llama"), tokenizer()

    def endless():
        while True:
            yield {"input_ids": torch.ones(50, 4, dtype=torch.long), "labels": None}

    assert [batch["input_ids"].shape for batch in batches(model, endless(), None)] == [(128, 4)]
    (long,) = batches(model, ["abc " * 500], words)
    assert long["input_ids"].shape == (1, 128)  # as many positions as the model has
    rows = windows("abc " * 100, words, 32)
    assert {row.shape for row in rows} == {(1, 32)} and len(rows) > 1
    assert [row.shape[1] < 32 for row in windows("abc", words, 32)] == [True]


def test_changed_parameters_are_put_in_place_and_saved(monkeypatch, tmp_path):
    """As of a method that moves scales from a norm into the weights behind it."""
    model, real = make("llama"), running.quantize_layers

    def scaled(result: LayerResult) -> LayerResult:
        name = f"{result.path}.input_layernorm.weight"
        return result._replace(changed={name: torch.full((64,), 0.5)})

    monkeypatch.setattr(running, "quantize_layers", lambda *given: map(scaled, real(*given)))
    accel.quantize(model, "int8", out=tmp_path / "out")
    assert all((layer.input_layernorm.weight == 0.5).all() for layer in layers(model).values())
    assert type(model.model.layers[0].mlp.up_proj) is QuantizedLinear
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded)["logits"], logits(model)["logits"])
