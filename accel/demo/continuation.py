"""The second part: a small language model continues a prompt, stock and optimized, from the same seed.

As with the digits, two copies are loaded as any user would, one is given to `accel.optimize`, and the two take turns.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

import accel
from accel import saved
from accel.bench.timing import seconds
from accel.demo.shipped import device_line, find_folder, speed_ratio
from accel.report import Report

MODEL = Path("examples", "models", "tiny-lm")
PROMPT = "It was a beautiful evening, and Emma"
RUNS = 3  # of each model, timed; one before them is not


def find_model(folder: Path | None) -> Path:
    """The given folder; without one, the language model of a checkout. Raises FileNotFoundError saying what to do."""
    return find_folder(folder, MODEL, "model", "config.json")


@dataclass(frozen=True)
class Continuation:
    """What was written and measured: tokens of the prompt and after it, and the seconds of each run."""

    prompt: str
    stock: list[int]
    optimized: list[int]
    texts: tuple[str, str]  # what follows the prompt: stock's, and ours
    stock_s: list[float]
    optimized_s: list[float]
    ready_s: float
    restored_equal: bool
    machine: str
    report: Report

    @property
    def same(self) -> int:
        """How many tokens are the same from the first on; where one differs, all after it follow another text."""
        pairs = zip(self.stock, self.optimized, strict=False)
        return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(self.stock), len(self.optimized)))

    def table(self) -> Table:
        stock_s, optimized_s = statistics.median(self.stock_s), statistics.median(self.optimized_s)
        count, ours = len(self.stock), len(self.optimized)
        shown = Table(title=f"{count} tokens after a prompt, on {self.machine}; medians", title_justify="left")
        shown.add_column("")
        for name in ("stock", "accel", "ratio"):
            shown.add_column(name, justify="right")
        ratio = speed_ratio(self.stock_s, self.optimized_s, self.report)
        shown.add_row("tokens per second", f"{count / stock_s:.1f}", f"{ours / optimized_s:.1f}", ratio)
        shown.add_row("time per token", f"{stock_s / count * 1e3:.2f} ms", f"{optimized_s / ours * 1e3:.2f} ms", "")
        shown.add_row("time to ready", "", f"{self.ready_s:.2f} s", "")
        equal = self.stock == self.optimized
        shown.add_row("same tokens", "", "all" if equal else f"the first {self.same}", f"of {count}")
        shown.add_row("undone by accel.restore", "", "bit-equal" if self.restored_equal else "[red]not equal[/red]", "")
        return shown

    def show(self, console: Console) -> None:
        console.print(self.table())
        console.print(Text(self.report.summary()))
        alike = self.texts[0] == self.texts[1]
        for name, text in zip(("both",) if alike else ("stock", "accel"), self.texts, strict=False):
            console.print(Text.assemble(f"\n{name}: ", (self.prompt, "bold"), (text, "cyan")))
        if not alike:
            console.print("\nThey part where rounding tipped a draw; --dtype fp32 rounds less.")


class Writer:
    """A model and what it is to write: tokens of a prompt, how many new ones, the seed they are drawn with."""

    def __init__(self, model: Any, inputs: Any, new_tokens: int, seed: int) -> None:
        self.model, self.inputs, self.new_tokens, self.seed = model, inputs, new_tokens, seed
        self.times: list[float] = []

    @property
    def device(self) -> torch.device:
        return self.model.device

    def write(self) -> list[int]:
        """The new tokens. Ends of text are not drawn, so that there are as many as asked for."""
        size = {"max_new_tokens": self.new_tokens, "min_new_tokens": self.new_tokens}
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            tokens = self.model.generate(**self.inputs, **size, do_sample=True, temperature=0.7, top_p=0.9)
        return tokens[0, self.inputs["input_ids"].shape[1] :].tolist()

    def time(self) -> None:
        self.times.append(seconds(self.write, self.device))

    @torch.no_grad()
    def logits(self) -> torch.Tensor:
        return self.model(**self.inputs).logits


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
    """Continues the prompt with both models in turn. The first text of each is a warm-up, written before."""
    from transformers import AutoTokenizer

    task = progress.add_task("loading a language model", total=2 * RUNS + 3)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt").to(device)
    stock, optimized = (Writer(saved.load_saved(folder, dtype, device), inputs, new_tokens, seed) for _ in range(2))
    progress.update(task, description="warming up stock", advance=1)
    stock.write()
    progress.update(task, description="optimizing", advance=1)
    first_s = seconds(lambda: (accel.optimize(optimized.model), optimized.write()), device)

    progress.update(task, description="writing")
    for number in range(RUNS):
        for writer in (stock, optimized) if number % 2 else (optimized, stock):
            writer.time()
            progress.advance(task)

    tokens = stock.write(), optimized.write()
    report = accel.report(optimized.model)
    progress.update(task, description="undoing", advance=1)
    accel.restore(optimized.model)
    return Continuation(
        prompt=prompt,
        stock=tokens[0],
        optimized=tokens[1],
        texts=tuple(map(tokenizer.decode, tokens)),
        stock_s=stock.times,
        optimized_s=optimized.times,
        ready_s=max(0.0, first_s - statistics.median(optimized.times)),
        restored_equal=torch.equal(optimized.logits(), stock.logits()),
        machine=device_line(device),
        report=report,
    )
