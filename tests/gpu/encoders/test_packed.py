"""Packed encoders on a GPU: graphs by how many tokens there are, and of whole calls where these are few."""

import copy

import pytest
import torch
import transformers as t

import accel
from accel.bench.encoders.texts import batched, texts
from accel.comparison import relative_rms

SIZES = {"vocab_size": 500, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 512, "max_position_embeddings": 600}
PADS = dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id"), 0) | {"sep_token_id": 1, "eos_token_id": 1}
MODELS = {
    "Bert": ("BertModel", t.BertConfig(**SIZES)),
    "Roberta": ("RobertaForSequenceClassification", t.RobertaConfig(**SIZES, num_labels=64)),
    "ModernBert": ("ModernBertForMaskedLM", t.ModernBertConfig(**SIZES, **PADS)),
    "NomicBert": ("NomicBertModel", t.NomicBertConfig(**SIZES)),
    "MPNet": ("MPNetModel", t.MPNetConfig(**SIZES)),
    "T5": ("T5EncoderModel", t.T5Config(vocab_size=500, d_model=256, d_ff=512, num_layers=3, num_heads=4)),
    "Qwen3": ("Qwen3Model", t.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=64, use_cache=False)),
}


@pytest.fixture(params=MODELS)
def pair(request):
    kind, config = MODELS[request.param]
    torch.manual_seed(0)
    stock = getattr(t, kind)(config).cuda().eval().requires_grad_(False)
    model = copy.deepcopy(stock).bfloat16()
    return accel.optimize(model), stock


def shown(output, mask):
    """Logits, or rows that are no padding."""
    if "logits" in output and output.logits.dim() == 2:
        return output.logits.float()
    return next(iter(output.values()))[mask.bool()].float()


def assert_close(model, stock, call):
    exact, half = shown(stock(**call), call["attention_mask"]), copy.deepcopy(stock).bfloat16()
    allowed = relative_rms(shown(half(**call), call["attention_mask"]), exact)
    assert relative_rms(shown(model(**call), call["attention_mask"]), exact) <= 1.3 * allowed + 1e-4


def rows(model):
    return [row for row in accel.report(model).graphs if row["status"] == "graph"]


@torch.no_grad()
@pytest.mark.usefixtures("exact")
def test_batches_of_any_lengths(pair):
    model, stock = pair
    for batch in batched(texts(64, 500, 300), 16, torch.device("cuda")):
        for _ in range(4):
            assert_close(model, stock, batch)
    assert rows(model) and not accel.report(model).fallbacks


@torch.no_grad()
@pytest.mark.usefixtures("exact")
def test_few_tokens_are_one_graph_and_padding_is_not_part_of_it(pair):
    model, stock = pair
    ids = torch.arange(4, 44, device="cuda").view(2, 20)
    full, short = torch.ones_like(ids), torch.ones_like(ids)
    short[1, 7:] = 0
    for mask in (full, full, full, full, short, full, short, short, short):
        assert_close(model, stock, {"input_ids": ids, "attention_mask": mask})
    assert len(rows(model)) == 2 and not accel.report(model).fallbacks


@torch.no_grad()
@pytest.mark.usefixtures("exact")
def test_a_capture_of_the_users_own(pair):
    model, stock = pair
    ids = torch.arange(4, 44, device="cuda").view(2, 20)
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert_close(model, stock, call)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model(input_ids=ids)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        output = model(input_ids=ids)
    graph.replay()
    exact = shown(stock(**call), call["attention_mask"])
    assert relative_rms(shown(output, call["attention_mask"]), exact) < 0.03
