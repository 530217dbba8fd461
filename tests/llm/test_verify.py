"""The quality gate of language models: what only rounds otherwise passes, what is wrong fails, wherever it is wrong."""

import copy
import json

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, pipeline
from typer.testing import CliRunner

import accel
from accel import api
from accel.commands.app import app
from accel.llm.recording.inputs import causal, example_inputs
from accel.llm.verify import NEW
from accel.patching.fast_forward import FastForward
from accel.patching.rule import Match, Rule
from accel.planning.plan import PLAN, Plan

WORDS = ("the", "cat", "sat", "on", "a", "mat")


@pytest.fixture
def llama():
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({word: number + 3 for number, word in enumerate(WORDS)} | {"?": 0}, "?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="?")


class Changed(FastForward):
    """The stock forward, with its logits changed where a test wants it."""

    change = staticmethod(lambda logits, kwargs: logits)

    def fast(self, *args, **kwargs):
        out = self.stock(*args, **kwargs)
        out.logits = self.change(out.logits, kwargs)
        return out


@pytest.fixture
def wrong(monkeypatch):
    """wrong(change): models are then optimized by change(logits, keywords of the call) alone."""

    def match(site, context):
        if not site.path:
            return Match(Changed(site.module, "", context.kernels, context.log), covers=None)
        return None

    def set_change(change):
        monkeypatch.setattr(Changed, "change", staticmethod(change))
        rules = [Rule("changed", match)]
        monkeypatch.setattr(api, "plan_for", lambda part, context: Plan(part, rules, context.for_model()))

    return set_change


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_passes_by_the_rounding_of_its_own_dtype(llama, dtype, wrong):
    wrong(lambda logits, kwargs: logits + torch.finfo(logits.dtype).eps / 4 * logits.abs().mean())
    model = accel.optimize(llama.to(dtype))
    quality = accel.verify(model)
    assert quality.passed, str(quality)
    assert set(quality.parts) == {"prompt", "decode"}
    for part in quality.parts.values():
        assert 0 < part.error <= part.allowed < 32 * torch.finfo(dtype).eps + 1e-5
        assert part.measure == "relative RMS from full precision"
    agreement = quality.agreement
    assert agreement.tokens == 2 * NEW and agreement.equal <= agreement.tokens
    assert agreement.positions == 48 + 32 + 2 * NEW  # the second row is shorter by a third
    assert 0 <= agreement.kl <= agreement.worst_kl < 1e-3 and agreement.own_kl >= 0
    assert PLAN in vars(model)


def test_models_as_optimized_now_pass(llama):
    small = GPT2LMHeadModel(GPT2Config(vocab_size=53, n_embd=24, n_layer=2, n_head=2, n_positions=80)).eval()
    for model in (llama, small):
        before = copy.deepcopy(model.state_dict())
        quality = accel.verify(accel.optimize(model))
        assert quality.passed and quality.agreement.equal == quality.agreement.tokens, str(quality)
        after = accel.restore(model).state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "change, part",
    [
        (lambda logits, kwargs: 1.01 * logits, "prompt"),
        (lambda logits, kwargs: logits * (1.01 if logits.shape[1] == 1 else 1), "decode"),
        (lambda logits, kwargs: logits * (1 if logits.shape[1] == 1 else float("nan")), "prompt"),
    ],
    ids=["everywhere", "in decode steps", "nan in prompts"],
)
def test_what_is_wrong_fails_and_is_named(llama, wrong, change, part):
    wrong(change)
    quality = accel.verify(accel.optimize(llama))
    assert quality.verdict.startswith(f"FAILED: {part}: ") or not quality.parts[part].finite
    assert not quality.passed and not quality.parts[part].passed
    assert quality.parts["prompt"].passed == (part == "decode")


def test_what_padding_gives_means_nothing(llama, wrong):
    def change(logits, kwargs):
        mask = kwargs.get("attention_mask")
        if mask is None or mask.shape != logits.shape[:2]:
            return logits
        return logits.masked_fill(mask[..., None] == 0, float("nan"))

    wrong(change)
    quality = accel.verify(accel.optimize(llama))
    assert quality.passed and quality.finite and quality.max_error == 0


def test_text_that_parts_from_stocks_where_the_logits_do_not_say_so(llama, wrong):
    """Right as long as it is told what to write: a cache that generate() mistreats would look like this."""
    told = []

    def change(logits, kwargs):
        told.append(1)
        if len(told) == 4:  # in the first greedy text of the optimized model
            return logits.roll(1, dims=-1)
        return logits

    wrong(change)
    quality = accel.verify(accel.optimize(llama))
    assert all(part.passed for part in quality.parts.values())
    assert quality.agreement.equal < quality.agreement.tokens
    assert quality.verdict.startswith("FAILED: greedy text differs where stock preferred")


def test_the_margin_is_a_few_errors_of_the_logits_and_no_more(llama, wrong):
    """Tokens in pairs whose logits differ by several times what errors explain; ten times that would excuse it."""
    head = llama.lm_head.weight
    with torch.no_grad():
        head[1::2] = head[:-1:2] * (1 - 6e-5)
        head[-1] = 0
    steps = []

    def change(logits, kwargs):
        steps.append(logits.shape[1] == 1)
        logits = logits + 1e-6  # an error that the prompt and the steps are allowed
        if len(steps) == 4:  # in the first greedy text of the optimized model
            best, second = logits.topk(2).indices.unbind(-1)
            assert ((best ^ second) == 1).all()
            logits = logits.scatter(-1, best[..., None], -1.0)
        return logits

    wrong(change)
    quality = accel.verify(accel.optimize(llama))
    assert steps[3] and all(part.passed for part in quality.parts.values())
    agreement = quality.agreement
    assert 0 < agreement.margin_allowed < agreement.margin < 9 * agreement.margin_allowed
    assert quality.verdict.startswith("FAILED: greedy text differs where stock preferred")


def test_inputs_of_the_users_own(llama, tokenizer):
    accel.optimize(llama)
    inputs = tokenizer("the cat sat on a mat", return_tensors="pt")
    for given in ({"input_ids": inputs["input_ids"]}, {name: inputs[name] for name in ("input_ids", "attention_mask")}):
        quality = accel.verify(llama, **given)
        assert quality.passed and quality.agreement.positions == 6 + NEW
    assert accel.verify(llama, inputs["input_ids"]).agreement.positions == 6 + NEW
    embedded = llama.get_input_embeddings()(inputs["input_ids"]).detach()
    assert accel.verify(llama, inputs_embeds=embedded).agreement.positions == 6 + NEW


def test_what_generate_does_not_take_is_compared_as_one_forward(llama, tokenizer):
    accel.optimize(llama)
    ids = tokenizer("the cat sat", return_tensors="pt")["input_ids"]
    quality = accel.verify(llama, input_ids=ids, labels=ids)
    assert quality.passed and quality.agreement is None


def test_a_text_generation_pipeline(llama, tokenizer):
    pipe = accel.optimize(pipeline("text-generation", model=llama, tokenizer=tokenizer, device="cpu"))
    assert accel.verify(pipe, "the cat sat").agreement.positions == 3 + NEW
    assert accel.verify(pipe, ["the cat sat", "a mat"]).agreement.positions == 3 + 2 + 2 * NEW
    assert accel.verify(pipe).agreement.positions == 48 + 32 + 2 * NEW


def test_example_inputs(llama):
    inputs = example_inputs(llama, 4, 30)
    assert inputs["attention_mask"].sum(-1).tolist() == [30, 20, 10, 30]
    assert not inputs["input_ids"][inputs["attention_mask"] == 0].any()
    assert example_inputs(llama, 1, 1000)["input_ids"].shape == (1, 128)
    assert causal(llama) and not causal(llama.model) and not causal(llama.lm_head) and not causal(None)


def command(*arguments):
    return CliRunner(env={"TERM": "dumb", "COLUMNS": "160"}).invoke(app, [str(argument) for argument in arguments])


@pytest.mark.turns(2)
def test_the_command(llama, tokenizer, tmp_path, wrong):
    llama.save_pretrained(tmp_path)
    call = ("verify", tmp_path, "--device", "cpu")
    result = command(*call)
    assert result.exit_code == 0, result.output
    assert all(word in result.output for word in ("prompt", "decode", "KL", "tokens equal", "passed"))
    result = command(*call, "--prompt", "the cat")
    assert result.exit_code == 2 and "holds no tokenizer" in result.output
    assert command(*call, "--steps", "3").exit_code == 2
    tokenizer.save_pretrained(tmp_path)
    result = command(*call, "--prompt", "the cat sat", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["agreement"]["positions"] == 3 + NEW
    wrong(lambda logits, kwargs: 1.01 * logits)
    result = command(*call)
    assert result.exit_code == 1 and "FAILED: prompt" in result.output
