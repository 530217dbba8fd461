"""Train a Llama of about 100 million weights on Jane Austen's novels, for `quality` to quantize: minutes of one GPU.

    apt-get download r-cran-janeaustenr
    python -m benchmarks quality-model OUT r-cran-janeaustenr_*.deb

The text, its licence (public domain) and its split are tiny-lm's, see examples/models: chapter 10 of each novel is
held out, and tokens are tiny-lm's, so that perplexities compare. So large a model learns a million tokens by heart
within a few passes; what keeps it from that is dropout on what each layer adds. Chapter 9, which it is not trained on,
says which of its states is kept. Muon for the matrices, AdamW for the rest, bf16 products. OUT is what
`from_pretrained` loads, in fp16, with what was done in training.json.

--toy: two layers and a few steps, on text of the repository: for tests.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import typer
from torch import nn
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from accel.bench.machine import commit, machine, now
from benchmarks.quality.text import CALIBRATION, HELD_OUT, chapters, perplexity, windows
from benchmarks.study import DEVICE, ROOT

sys.path.insert(0, str(ROOT / "examples" / "models"))
import train_tiny_lm as tiny

CHOOSING = 9  # this chapter of each novel chooses between models
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


def make(tokenizer, sizes: dict, device: torch.device) -> LlamaForCausalLM:
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    more = {"max_position_embeddings": tiny.WINDOW, "tie_word_embeddings": True}
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **more, **ids))
    model.generation_config = GenerationConfig(**ids)
    return model


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


@dataclass(frozen=True)
class Pace:
    """steps, or as many as the seconds allow; `each` of them the model is measured. rate, decay: of Muon."""

    steps: int
    seconds: float
    each: int
    rate: float
    decay: float
    compiled: bool


def fit(model: nn.Module, draw: Callable, pace: Pace, measure: Callable) -> dict:
    """Trains, and leaves the weights that were best on `measure`.

    The rate rises for a twentieth and falls to zero, over steps or seconds, whichever are over first.
    """
    steps = pace.steps
    matrices = [w for name, w in model.named_parameters() if w.ndim == 2 and "embed" not in name]
    others = [w for name, w in model.named_parameters() if w.ndim != 2 or "embed" in name]
    device = others[0].device
    optimizers = [
        torch.optim.Muon(matrices, lr=pace.rate, weight_decay=pace.decay),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01, fused=device.type == "cuda"),
    ]
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    run = torch.compile(model) if pace.compiled else model
    begun, step, best, kept, course = time.monotonic(), 0, float("inf"), {}, []
    while (done := max(step / steps, (time.monotonic() - begun) / pace.seconds)) < 1:
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * min((done + 1 / steps) / 0.05, (1 - done) / 0.95)
        tokens = draw()
        with torch.autocast(device.type, torch.bfloat16):
            logits = run(tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        step += 1
        if step % pace.each == 0 or step == steps:
            course.append({"step": step, "loss": round(loss.item(), 4), "perplexity": measure()})
            print(f"  {course[-1]}, {time.monotonic() - begun:.0f} s", flush=True)
            if course[-1]["perplexity"] < best:
                best = course[-1]["perplexity"]
                kept = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    if (last := measure()) < best:  # where the seconds were over between two looks
        best = last
    else:
        model.load_state_dict(kept)
    return {"steps": step, "seconds": round(time.monotonic() - begun, 1), "chapter_9": best, "course": course}


@torch.enable_grad()
def main(
    out: Path, package: Path | None = None, dropout: float = 0.2, passes: float = 8.0, seconds: float = 90.0,
    batch: int = 32, rate: float = 0.02, decay: float = 0.1, seed: int = 0, compiled: bool = False, toy: bool = False,
) -> dict:  # fmt: skip
    """package: with the novels. passes: over the text. seconds: at most. batch: windows of text. rate: of Muon. decay:
    of the matrices' weights.
    """
    if not toy and package is None:
        raise typer.BadParameter("give the package with the novels, or --toy")
    tokenizer = AutoTokenizer.from_pretrained(HELD_OUT.parent)
    learnt, choosing = texts(None if toy else package)
    source = tiny.Windows(tokenizer, learnt)
    source.tokens, source.starts = source.tokens.to(DEVICE), source.starts.to(DEVICE)
    chosen_by, held_out = windows(tokenizer, choosing), windows(tokenizer, chapters(HELD_OUT))
    each = max(1, len(source.tokens) // (batch * tiny.WINDOW))  # steps that see as many tokens as there are
    pace = Pace(4 if toy else round(passes * each), seconds, each, rate, decay, compiled)
    torch.manual_seed(seed)
    model = make(tokenizer, TOY if toy else SIZES, DEVICE)

    def draw() -> torch.Tensor:
        with DEVICE:
            return source.draw(batch)

    def measure() -> float:
        model.eval()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            found = perplexity(model, chosen_by)
        model.train()
        return round(found, 3)

    with dropping(model, dropout):
        run = {"dropout": dropout, "passes": passes} | fit(model.train(), draw, pace, measure)
    best = save(model, tokenizer, out)
    text = str(CALIBRATION.relative_to(ROOT)) if toy else "janeaustenr: six novels without chapters 9 and 10"
    told = {
        "parameters": best.num_parameters(),
        "tokens": len(source.tokens),
        "held_out": round(perplexity(best, held_out[:4] if toy else held_out), 3),
        "runs": [run],
        "text": text,
    }
    told |= {"batch": batch, "rate": rate, "decay": decay, "seed": seed}
    told |= {"date": now(), "commit": commit(), "machine": machine(DEVICE)}
    (out / "training.json").write_text(json.dumps(told, indent=2) + "\n")
    print(f"held-out perplexity {told['held_out']}; saved in {out}", flush=True)
    return told


def save(model: LlamaForCausalLM, tokenizer, folder: Path) -> LlamaForCausalLM:
    """The model in float32 with the values that lie in the folder, in fp16."""
    model.eval().half().save_pretrained(folder)
    model.float().config.dtype = torch.float32
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
