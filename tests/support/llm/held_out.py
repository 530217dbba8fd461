"""Text held out for perplexities, and bytes that live beside a model."""

import copy
import math
import weakref
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FOLDER = Path(__file__).parents[3] / "examples" / "models" / "tiny-lm"
HELD_OUT = FOLDER / "held_out.txt"
CALIBRATION = Path(__file__).with_name("training_text.txt")  # of what it was trained on
WINDOW = 512


@torch.no_grad()
def losses(model, tokenizer, every: int = 1) -> list[tuple[float, int, int]]:
    """(sum of its losses, its tokens, its place in the chapter) of each window, which all begin anew."""
    found = []
    for chapter in HELD_OUT.read_text().split("\n\n"):
        tokens = torch.tensor(tokenizer(chapter, add_special_tokens=False, verbose=False).input_ids)
        for place, window in list(enumerate(tokens.split(WINDOW)))[::every]:
            window = F.pad(window, (1, 0), value=tokenizer.bos_token_id)
            loss = F.cross_entropy(model(window[None, :-1]).logits[0], window[1:], reduction="sum").item()
            found.append((loss, len(window) - 1, place))
    return found


def mean_perplexity(losses: list[tuple[float, int, int]], every: int = 1) -> float:
    """exp of the mean loss a token. every: 4 for every fourth window of a chapter only."""
    chosen = [(loss, count) for loss, count, place in losses if place % every == 0]
    loss, count = map(sum, zip(*chosen, strict=True))
    return math.exp(loss / count)


def perplexity(model, tokenizer, every: int = 1) -> float:
    """On the text held out. every: 4 for every fourth window of a chapter only."""
    return mean_perplexity(losses(model, tokenizer, every))


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import accel
    from accel.options import WEIGHTS

    tokenizer, stock = AutoTokenizer.from_pretrained(FOLDER), AutoModelForCausalLM.from_pretrained(FOLDER)
    own = perplexity(stock, tokenizer)
    print(f"{'stock':14} {own:.3f}")
    for name in WEIGHTS:
        model = accel.optimize(copy.deepcopy(stock), weights=name)
        weights, sites = accel.report(model).weights, accel.report(model).sites
        found, total = perplexity(model, tokenizer), sum(rule == "weights" for _, rule, _, _ in sites)
        ratio = min(row["sqnr_db"] for row in weights)
        print(
            f"{name:14} {found:.3f} {found / own - 1:+.2%}  {len(weights)} of {total} linears, {ratio:.1f} dB or more"
        )


if __name__ == "__main__":
    main()


class LiveBytes(TorchDispatchMode):
    """While entered, counts what is made; `peak`: the most at a time, beyond what the model held at the beginning."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.most = 0
        for tensor in (*model.parameters(), *model.buffers()):
            self._count(tensor)
        self.start = self.most = self.now

    @property
    def peak(self) -> int:
        return self.most - self.start

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return made

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta:  # of some size, and no memory
            return
        storage = tensor.untyped_storage()
        key = storage._cdata  # free for another as soon as this one dies
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += self.sizes[key]
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._dead, key)

    def _dead(self, key: int) -> None:
        self.now -= self.sizes.pop(key)
