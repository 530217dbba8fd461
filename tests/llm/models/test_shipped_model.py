"""examples/models/tiny-lm: what its card says of it is so, and optimized it writes the tokens that stock writes."""

import copy
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import accel
from support.everything import EVERYTHING
from support.llm.held_out import CALIBRATION, FOLDER, HELD_OUT, losses, mean_perplexity

PROMPTS = ["Emma was", "It is a truth universally acknowledged, that a man who can dance", '"Oh! my dear Jane,']

MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8, "repetition_penalty": 1.1},
    "beams": {"num_beams": 4, "num_return_sequences": 2, "no_repeat_ngram_size": 3},
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def stock():
    return AutoModelForCausalLM.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def fast(stock):
    return accel.optimize(copy.deepcopy(stock))


@pytest.fixture(scope="module")
def own_losses(stock, tokenizer):
    return losses(stock, tokenizer)


@pytest.fixture(scope="module")
def card() -> str:
    return (FOLDER / "README.md").read_text()


def write(model, inputs, **mode) -> list[list[int]]:
    torch.manual_seed(0)
    return model.generate(**inputs, **{"max_new_tokens": 32, "do_sample": False} | mode).tolist()


def test_the_folder_is_small_and_holds_no_code():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 10e6
    assert {path.suffix for path in files} == {".json", ".jinja", ".safetensors", ".md", ".txt"}


def test_the_card_says_whose_text_it_is_and_under_which_licence(card):
    for words in ("Jane Austen", "public domain", "Apache-2.0", "held_out.txt", "train_tiny_lm.py"):
        assert words in card


def test_text_to_calibrate_on_is_none_of_the_held_out():
    paragraphs = {line for line in CALIBRATION.read_text().splitlines() if line}
    assert len(paragraphs) > 50 and not paragraphs & set(HELD_OUT.read_text().splitlines())


@pytest.mark.skipif(not EVERYTHING, reason="seconds of work; ACCEL_TEST_EVERYTHING=1 runs it")
def test_the_held_out_perplexity_is_that_of_the_card(own_losses, card):
    said = float(re.search(r"perplexity (\d+\.\d+)", card)[1])
    assert mean_perplexity(own_losses) == pytest.approx(said, rel=0.01)
    trigram = float(re.search(r"trigram\D+(\d+\.\d+)", card)[1])
    assert said < 0.8 * trigram


def test_it_is_what_large_models_are_like(stock):
    config = stock.config
    assert config.model_type == "llama" and config.tie_word_embeddings
    assert 1 < config.num_key_value_heads < config.num_attention_heads
    assert stock.dtype == torch.float32  # by itself, though stored in half of that


def test_it_writes_words_of_its_corpus(stock, tokenizer):
    known = set(re.findall(r"[a-z]+", HELD_OUT.read_text().lower()))
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    rows = write(stock, inputs, max_new_tokens=60, do_sample=True, top_p=0.9)
    words = [
        word for row in rows for word in re.findall(r"[a-z]+", tokenizer.decode(row, skip_special_tokens=True).lower())
    ]
    assert len(words) > 80 and len(set(words)) > 50
    assert sum(word in known for word in words) > 0.85 * len(words)


@pytest.mark.parametrize("text", ["Elizabeth's £10,000 a year", "naïve\n\n  空 🙂", ""])
def test_the_tokenizer_spells_any_text(tokenizer, text):
    tokens = tokenizer(text).input_ids
    assert tokens[0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_the_chat_template_grows_by_whole_turns(tokenizer):
    turns = [("user", "Is he single?"), ("assistant", "Oh! single, my dear."), ("user", "What a fine thing!")]
    chat = [{"role": role, "content": content} for role, content in turns]
    first = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=True).input_ids
    whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True).input_ids
    assert whole[: len(first)] == first
    assert whole.count(tokenizer.eos_token_id) == 3 and tokenizer.decode(whole[-1:]) == "<|reply|>"


@pytest.mark.parametrize("mode", MODES)
def test_optimized_it_writes_the_tokens_of_stock_in_a_padded_batch(stock, fast, tokenizer, mode):
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    assert inputs.attention_mask[0, 0] == 0
    assert write(fast, inputs, **MODES[mode]) == write(stock, inputs, **MODES[mode])
