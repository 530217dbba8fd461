"""Models whose layers transformers has divided among processes, `DistributedConfig(pp_size=N)`, stay stock."""

from support.llm.families import make, prompt
from support.spread import between_processes

REASON = "pp_size=2: each process holds some of the layers, and its calls wait for the others"


def test_two_processes_compute_what_one_does(rank_pool, tmp_path):
    stock = make("llama", num_hidden_layers=4)
    stock.save_pretrained(tmp_path)
    wanted = stock.generate(prompt(2, 6), max_new_tokens=5, do_sample=False, pad_token_id=0).tolist()
    for found in rank_pool(2).run(between_processes, str(tmp_path)):
        assert found["wanted"] == found["got"] == wanted
        assert [tuple(row) for row in found["told"]] == [("", "language model", "skipped", REASON)]
