"""Steps of encoder-decoder models on a GPU: really replayed, for every length, and never over another text's keys."""

import copy

import pytest
import torch
import transformers as t

import accel

pytestmark = pytest.mark.usefixtures("exact")

TEXT = {"vocab_size": 256, "d_model": 64, "forced_eos_token_id": None}
for side in ("encoder", "decoder"):
    TEXT |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 128}
T5 = {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
MAKES = {
    "Bart": lambda: t.BartForConditionalGeneration(t.BartConfig(**TEXT)),
    "M2M100": lambda: t.M2M100ForConditionalGeneration(t.M2M100Config(**TEXT)),
    "T5": lambda: t.T5ForConditionalGeneration(t.T5Config(**T5, decoder_start_token_id=0)),
}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", MAKES)
def test_one_graph_serves_texts_of_every_length(family, implementation):
    torch.manual_seed(0)
    stock = MAKES[family]().eval().cuda()
    stock.set_attn_implementation(implementation)
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    ours = accel.optimize(copy.deepcopy(stock), graphs=True)
    runner = vars(ours)["forward"].runner
    for text, (rows, length, tokens, beams) in enumerate(
        [(3, 60, 40, 4), (3, 9, 40, 1), (3, 33, 100, 1), (3, 50, 20, 4), (12, 64, 20, 1), (3, 9, 40, 1)]
    ):
        ids = torch.randint(5, 256, (rows, length), device="cuda")
        mask = (
            torch.arange(length, device="cuda") < length - 4 * torch.arange(rows, device="cuda")[:, None].clamp(max=2)
        ).long()
        call = {"attention_mask": mask, "max_new_tokens": tokens, "min_new_tokens": tokens, "num_beams": beams}
        call |= {"no_repeat_ngram_size": 2}
        assert torch.equal(ours.generate(ids, **call), stock.generate(ids, **call)), text
    graphs = [entry for entry in runner.entries.values() if entry.graph is not None]
    assert len(graphs) == 2 and runner.replays > 150, accel.report(ours)  # of 3 and of 12 rows
    assert accel.report(ours).fallbacks == []
