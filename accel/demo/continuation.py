"""The third part: a small language model continues a prompt, stock and optimized, from the same seed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from accel import saved
from accel.demo.comparison import Comparison, run_both

MODEL = Path("examples", "models", "tiny-lm")
PROMPT = "It was a beautiful evening, and Emma"
RUNS = 3  # of each model, timed; one before them is not


@dataclass(frozen=True)
class Continuation(Comparison):
    """Tokens after a prompt. texts: what they say, stock's, and ours."""

    prompt: str
    texts: tuple[str, str]

    @property
    def same(self) -> int:
        """How many tokens are the same from the first on; where one differs, all after it follow another text."""
        pairs = zip(self.stock, self.optimized, strict=False)
        return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(self.stock), len(self.optimized)))

    def shown(self) -> Table:
        counts = len(self.stock), len(self.optimized)
        rates = [count / took for count, took in zip(counts, self.medians, strict=True)]
        same = "all" if self.stock == self.optimized else f"the first {self.same}"
        return self.table(
            f"{counts[0]} tokens after a prompt",
            ("tokens per second", *(f"{rate:.1f}" for rate in rates)),
            ("time per token", *(f"{1e3 / rate:.2f} ms" for rate in rates)),
            ("same tokens", "", same, f"of {counts[0]}"),
        )

    def show(self, console: Console) -> None:
        super().show(console)
        alike = self.texts[0] == self.texts[1]
        for name, text in zip(("both",) if alike else ("stock", "accel"), self.texts, strict=False):
            console.print(Text.assemble(f"\n{name}: ", (self.prompt, "bold"), (text, "cyan")))
        if not alike:
            console.print("\nThey part where rounding tipped a draw; --dtype fp32 rounds less.")


def run(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    prompt: str = PROMPT,
    new_tokens: int,
    seed: int,
    progress: Progress,
) -> Continuation:
    """Continues the prompt with both models in turn, the same in every turn."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt").to(device)

    def write(model: Any, number: int) -> list[int]:
        """The new tokens. Ends of text are not drawn, so that there are as many as asked for."""
        size = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            tokens = model.generate(**inputs, **size, do_sample=True, temperature=0.7, top_p=0.9)
        return tokens[0, inputs["input_ids"].shape[1] :].tolist()

    @torch.no_grad()
    def logits(model: Any) -> torch.Tensor:
        return model(**inputs).logits

    def load() -> Any:
        return saved.load_saved(folder, dtype, device)

    found = run_both(load, write, logits, RUNS, device, progress, "a text")
    found |= {name: found[name][-1] for name in ("stock", "optimized")}
    texts = tuple(tokenizer.decode(found[name]) for name in ("stock", "optimized"))
    return Continuation(**found, prompt=prompt, texts=texts)
