"""Train a Llama of about 100 million weights on Jane Austen's novels, for `quality` to quantize: minutes of one GPU.

    apt-get download r-cran-janeaustenr
    python -m benchmarks quality-model OUT r-cran-janeaustenr_*.deb

The text, its licence (public domain), its split and its training are tiny-lm's, see examples/models: chapter 10 of each
novel is held out, and tokens are tiny-lm's, so that perplexities compare. So large a model learns a million tokens by
heart within a few passes; what keeps it from that is dropout on what each layer adds. Chapter 9, which it is not
trained on, says which of its states is kept. OUT is what `from_pretrained` loads, in fp16, with what was done in
training.json.

--toy: two layers and a few steps, on text of the repository: for tests.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
import typer
from torch import nn
from transformers import AutoTokenizer

from accel.bench.machine import commit, machine, now
from accel.bench.results import write
from benchmarks.quality.text import CALIBRATION, HELD_OUT, chapters, perplexity, windows
from benchmarks.study import DEVICE, ROOT

sys.path.insert(0, str(ROOT / "examples" / "models"))
import train_tiny_lm as tiny

CHOOSING = 9  # this chapter of each novel chooses between states of the model
SIZES = {"hidden_size": 768, "intermediate_size": 2816, "num_hidden_layers": 12}
SIZES |= {"num_attention_heads": 12, "num_key_value_heads": 4}
TOY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TOY |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def texts(package: Path | None) -> tuple[list[list[str]], list[str]]:
    """Chapters to learn, each a list of paragraphs, and those to choose by; without a package, those of the tests."""
    if package is None:
        found = chapters(CALIBRATION)
        return [text.split("\n") for text in found[:-1]], found[-1:]
    books = [tiny.chapters(lines) for lines in tiny.novels(package)]
    held_out = {"\n".join(book.pop(tiny.HELD_OUT - 1)) for book in books}
    if held_out != set(chapters(HELD_OUT)):
        raise ValueError(f"{package}: chapter {tiny.HELD_OUT} of each novel is not what tiny-lm holds out")
    choosing = ["\n".join(book.pop(CHOOSING - 1)) for book in books]
    return [chapter for book in books for chapter in book], choosing


@contextmanager
def dropping(model: nn.Module, share: float) -> Iterator[None]:
    """Inside, that share of what attention and MLP add to the hidden states is dropped in training, of words too."""

    def drop(module, args, result):
        first, *rest = result if isinstance(result, tuple) else (result,)
        first = F.dropout(first, share, module.training)
        return (first, *rest) if isinstance(result, tuple) else first

    decoder = model.model
    with ExitStack() as undo:
        for module in (decoder.embed_tokens, *(part for one in decoder.layers for part in (one.self_attn, one.mlp))):
            undo.callback(module.register_forward_hook(drop).remove)
        yield


class Best:
    """Looks at a model every `each` steps, and keeps the state of the least perplexity on these windows."""

    def __init__(self, model: nn.Module, rows: torch.Tensor, each: int):
        self.model, self.rows, self.each = model, rows, each
        self.course: list[dict] = []
        self.state: dict[str, torch.Tensor] = {}

    def look(self, step: int) -> None:
        if step % self.each:
            return
        self.model.eval()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            found = round(perplexity(self.model, self.rows), 3)
        self.model.train()
        if found < min((one["perplexity"] for one in self.course), default=float("inf")):
            self.state = {name: weight.detach().clone() for name, weight in self.model.state_dict().items()}
        self.course.append({"step": step, "perplexity": found})


@torch.enable_grad()
def main(
    out: Path, package: Path | None = None, dropout: float = 0.2, passes: float = 8.0, batch: int = 32, seed: int = 0,
    toy: bool = False,
) -> dict:  # fmt: skip
    """package: with the novels. passes: over the text. batch: windows of text."""
    if not toy and package is None:
        raise typer.BadParameter("give the package with the novels, or --toy")
    tokenizer = AutoTokenizer.from_pretrained(HELD_OUT.parent)
    learnt, choosing = texts(None if toy else package)
    source = tiny.Windows(tokenizer, learnt)
    source.tokens, source.starts = source.tokens.to(DEVICE), source.starts.to(DEVICE)
    each = max(1, len(source.tokens) // (batch * tiny.WINDOW))  # steps that see as many tokens as there are
    torch.manual_seed(seed)
    model = tiny.make_model(tokenizer, TOY if toy else SIZES).to(DEVICE)
    steps = 4 if toy else round(passes * each)
    best = Best(model, windows(tokenizer, choosing), steps if toy else min(each, steps))
    with dropping(model, dropout):
        tiny.fit(model.train(), source, steps, batch, True, best.look)
    model.load_state_dict(best.state)
    tiny.save(model, tokenizer, out)
    held_out = windows(tokenizer, chapters(HELD_OUT))
    told = {
        "parameters": model.num_parameters(),
        "tokens": len(source.tokens),
        "held_out": round(perplexity(model, held_out[:4] if toy else held_out), 3),
        "runs": [{"dropout": dropout, "passes": passes, "course": best.course}],
        "text": CALIBRATION.name if toy else "janeaustenr: six novels without chapters 9 and 10",
    }
    told |= {"batch": batch, "seed": seed, "date": now(), "commit": commit(), "machine": machine(DEVICE)}
    write(told, out / "training.json")
    print(f"held-out perplexity {told['held_out']}; saved in {out}", flush=True)
    return told
