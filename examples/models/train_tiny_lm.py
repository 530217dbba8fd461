"""Train tiny-lm: a Llama in miniature that continues a text in the manner of Jane Austen.

Everything a large causal language model has is here, only smaller: grouped queries, rotary positions, RMS norms, a
gated MLP, a byte-level BPE tokenizer, a chat template. The result is a folder that
`AutoModelForCausalLM.from_pretrained` loads like any other.

Data: the six novels Jane Austen completed, published 1811 to 1818 and in the public domain, as they stand in the R
package janeaustenr (by Julia Silge), which Debian ships as r-cran-janeaustenr. The tenth chapter of each novel is held
out: neither tokenizer nor model sees it.

    apt-get download r-cran-janeaustenr
    python examples/models/train_tiny_lm.py r-cran-janeaustenr_*.deb

Needs torch, transformers and typer; R is not needed. Takes about half an hour on one CPU core that has AVX512-BF16;
without it give --no-bf16 and some patience. Same seed, machine and number of threads: the same weights.
"""

import io
import math
import re
import tarfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BEGIN, END, PAD, USER, REPLY = SPECIAL = ["<|begin|>", "<|end|>", "<|pad|>", "<|user|>", "<|reply|>"]
HELD_OUT = 10  # this chapter of each novel
WINDOW = 512  # tokens the model sees at once in training and when it is measured
AFTER_CHAPTER = r"^(?:VOLUME \w+|THE END|FINIS|Finis|A NOTE ON THE TEXT)$"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}\n"
    "{% else %}{{ '<|user|>' if message.role == 'user' else '<|reply|>' }}{{ message.content }}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|reply|>{% endif %}"
)


def novels(package: Path) -> Iterator[list[str]]:
    """The lines of each novel, from the Debian package: an `ar` archive, in it a tar, in it R's lazy-load database."""
    data, at, members = package.read_bytes(), 8, {}
    while at < len(data):
        name, size = data[at : at + 16].decode().strip().rstrip("/"), int(data[at + 48 : at + 58])
        members[name] = data[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    archive = next(content for name, content in members.items() if name.startswith("data.tar"))
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        name = next(name for name in tar.getnames() if name.endswith("/data/Rdata.rdb"))
        database = tar.extractfile(name).read()
    while database:  # one object after the other: its length, then its serialized form, deflated
        stream = zlib.decompressobj()
        yield strings(stream.decompress(database[4:]))
        database = stream.unused_data


def strings(serialized: bytes) -> list[str]:
    """A character vector of R, in version 3 of its XDR format: a header of 23 bytes, then flags and length of each."""

    def number(at: int) -> int:
        return int.from_bytes(serialized[at : at + 4], "big")

    assert serialized[:2] == b"X\n" and serialized[18:23] == b"UTF-8" and number(23) == 16, "not a vector of strings"
    found, at = [], 31
    for _ in range(number(27)):
        size = number(at + 4)
        found.append(serialized[at + 8 : at + 8 + size].decode())
        at += 8 + size
    return found


def chapters(lines: list[str]) -> list[list[str]]:
    """The chapters of a novel, each a list of paragraphs, each one line; no headings, no underscores for italics."""
    parts = re.split(r"^chapter \w+$", "\n".join(lines), flags=re.MULTILINE | re.IGNORECASE)[1:]
    found = []
    for part in parts:
        part = re.split(AFTER_CHAPTER, part.replace("_", ""), flags=re.MULTILINE)[0]
        found.append([" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", part) if paragraph.strip()])
    return found


def speech(paragraph: str) -> str:
    """What is said in a paragraph that is mostly speech, without "said she"; else nothing."""
    said = " ".join(re.findall(r'"([^"]+)"', paragraph))
    if not paragraph.startswith('"') or len(said) < 0.6 * len(paragraph):
        return ""
    return said[:-1] + "." if said.endswith(",") else said


def conversations(chapter: list[str]) -> Iterator[str]:
    """Speeches that follow each other, as turns of a chat: text with special tokens, whole in itself."""
    turns = []
    for paragraph in [*chapter, ""]:
        if said := speech(paragraph):
            turns.append((USER, REPLY)[len(turns) % 2] + said + END)
            continue
        if len(turns) > 1:
            yield "".join(turns)
        turns = []


def make_tokenizer(text: list[str], size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, SPECIAL.index(BEGIN))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[USER, REPLY],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=WINDOW,
        chat_template=CHAT_TEMPLATE,
    )


SIZES = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6}
SIZES |= {"num_attention_heads": 6, "num_key_value_heads": 2}


def make_model(tokenizer: PreTrainedTokenizerFast, sizes: dict[str, int] = SIZES) -> LlamaForCausalLM:
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            max_position_embeddings=WINDOW,
            tie_word_embeddings=True,
            **sizes,
            **ids,
        )
    )
    model.generation_config = GenerationConfig(**ids)
    return model


def encode(tokenizer: PreTrainedTokenizerFast, text: list[str], begin: bool = False) -> list[list[int]]:
    """The tokens of each text, however long, after the first token if `begin`."""
    return tokenizer(text, add_special_tokens=begin, verbose=False).input_ids


class Windows:
    """Draws batches of windows; each begins where a paragraph or a turn of the user does, as a prompt would."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: list[list[str]]):
        documents = ["\n".join(chapter) + END for chapter in text]
        documents += [chat for chapter in text for chat in conversations(chapter)]
        self.tokens = torch.tensor([token for tokens in encode(tokenizer, documents, begin=True) for token in tokens])
        self.first = tokenizer.bos_token_id
        ((line,),) = encode(tokenizer, ["\n"])
        begins = (self.tokens == self.first) | (self.tokens == line)
        begins = begins.roll(1) | (self.tokens == tokenizer.convert_tokens_to_ids(USER))
        starts = begins.nonzero()[:, 0]
        self.starts = starts[starts + WINDOW <= len(self.tokens)]

    def draw(self, count: int) -> Tensor:
        """(count, WINDOW + 1) tokens."""
        device = self.tokens.device
        start = self.starts[torch.randint(len(self.starts), (count, 1), device=device)]
        return F.pad(self.tokens[start + torch.arange(WINDOW, device=device)], (1, 0), value=self.first)


def fit(
    model: LlamaForCausalLM,
    windows: Windows,
    steps: int,
    batch: int,
    bf16: bool,
    after: Callable[[int], object] = lambda step: None,
) -> None:
    """Muon for the matrices, AdamW for the rest; the rate rises for a twentieth of the steps, then falls to zero.

    after: is called with the number of every step that was taken.
    """
    weights = dict(model.named_parameters())
    matrices = [weight for name, weight in weights.items() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in weights.items() if weight.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.05),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    rates = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / (0.05 * steps), (1 - step / steps) / 0.95)
        )
        for optimizer in optimizers
    ]
    smooth = None
    bar = tqdm(range(steps), mininterval=10)
    for step in bar:
        tokens = windows.draw(batch)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bf16):
            logits = model(tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        for stepped in (*optimizers, *rates):
            stepped.step()
        model.zero_grad()
        smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
        bar.set_postfix(loss=f"{smooth:.4f}", refresh=False)
        after(step + 1)


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[float, int]:
    """Of every token of every chapter, in windows that do not overlap and begin with the first token; and how many."""
    loss = count = 0
    for tokens in encode(tokenizer, text.split("\n\n")):
        for window in torch.tensor(tokens).split(WINDOW):
            window = F.pad(window, (1, 0), value=tokenizer.bos_token_id)
            loss += F.cross_entropy(model(window[None, :-1]).logits[0].float(), window[1:], reduction="sum").item()
        count += len(tokens)
    return math.exp(loss / count), count


def ngram_perplexity(tokenizer: PreTrainedTokenizerFast, text: list[str], held_out: str, order: int) -> float:
    """Of the n-gram model that counts the same tokens, smoothed as Witten and Bell do: what a network has to beat."""
    followers = defaultdict(Counter)  # context of up to order - 1 tokens -> what came after it, how often
    for tokens in encode(tokenizer, text):
        for at, token in enumerate(tokens):
            for length in range(min(order - 1, at) + 1):
                followers[tuple(tokens[at - length : at])][token] += 1
    totals = {context: counts.total() for context, counts in followers.items()}
    loss = count = 0
    for tokens in encode(tokenizer, held_out.split("\n\n")):
        for at, token in enumerate(tokens):
            chance = 1 / len(tokenizer)
            for length in range(min(order - 1, at) + 1):
                context = tuple(tokens[at - length : at])
                if counts := followers.get(context):
                    chance = (counts[token] + len(counts) * chance) / (totals[context] + len(counts))
            loss -= math.log(chance)
        count += len(tokens)
    return math.exp(loss / count)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """The weights are stored in half precision and loaded in the one that the config names; the model is in that."""
    model.eval().half().save_pretrained(out)
    model.float().config.dtype = torch.float32
    model.config.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main(
    package: Path,
    out: Path = Path(__file__).parent / "tiny-lm",
    seed: int = 0,
    steps: int = 1200,
    batch: int = 4,
    vocabulary: int = 2048,
    threads: int = 1,
    bf16: bool = True,
) -> None:
    """Train on the novels in PACKAGE, save the model under OUT with the held-out text, and measure it on that."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    books = [chapters(lines) for lines in novels(package)]
    held_out = "\n\n".join("\n".join(book.pop(HELD_OUT - 1)) for book in books)
    text = [chapter for book in books for chapter in book]
    known = {paragraph for chapter in text for paragraph in chapter if len(paragraph) > 80}
    assert len(books) == 6 and known.isdisjoint(held_out.split("\n")), "a held-out paragraph is in the training text"
    plain = ["\n".join(chapter) for chapter in text]

    tokenizer = make_tokenizer(plain, vocabulary)
    model = make_model(tokenizer)
    windows = Windows(tokenizer, text)
    chats = sum(1 for chapter in text for _ in conversations(chapter))
    print(
        f"{len(text)} chapters, {sum(map(len, plain)):,} characters; with {chats} chats {len(windows.tokens):,} tokens"
    )
    print(f"{model.num_parameters():,} weights")
    fit(model.train(), windows, steps, batch, bf16)

    save(model, tokenizer, out)
    (out / "held_out.txt").write_text(held_out)
    (out / "model.safetensors").chmod(0o644)  # to be read by all, like the files beside it
    value, count = perplexity(model, tokenizer, held_out)
    bits = math.log2(value) * count / len(held_out)
    print(f"held-out perplexity {value:.3f} over {count:,} tokens, {bits:.3f} bits a character")
    for order, name in ((1, "unigram"), (2, "bigram"), (3, "trigram")):
        print(f"{name} perplexity {ngram_perplexity(tokenizer, plain, held_out, order):.2f}")
    print(f"{out}: {sum(file.stat().st_size for file in out.rglob('*') if file.is_file()) / 1e6:.2f} MB")


if __name__ == "__main__":
    typer.run(main)
