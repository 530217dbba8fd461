"""What a script is: a name, and a function that makes its objects and its call as a user would."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeVar

import torch

from accel.bench.weights import SEED

T = TypeVar("T")
Built = tuple[Any, Callable[[], Any]]


@dataclass(frozen=True)
class Size:
    """Where and how large: published sizes, or `tiny` ones for a CPU. `size(real, tiny)` chooses between two values."""

    device: torch.device
    tiny: bool

    def __call__(self, real: T, tiny: T) -> T:
        return tiny if self.tiny else real

    @property
    def fp16(self) -> torch.dtype:
        """float16 on a GPU, where scripts of images use it; float32 elsewhere."""
        return torch.float16 if self.device.type == "cuda" else torch.float32

    @property
    def bf16(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def randn(self, *shape: int, dtype: torch.dtype | None = None, seed: int = SEED) -> torch.Tensor:
        """Normal numbers on the device, in float32 unless told otherwise."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device).to(dtype or torch.float32)

    def ids(self, rows: int, tokens: int, vocabulary: int, seed: int = SEED) -> torch.Tensor:
        """Random token ids on the device, none of them among the first ten, which are special."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randint(10, vocabulary, (rows, tokens), generator=generator, device=self.device)


@dataclass(frozen=True)
class Script:
    """`build(size)` gives the object that a user would hand to `accel.optimize`, and a call of it without arguments.

    Each build gives the same weights and the same results. A call returns what it computes: tensors, or token ids.
    packages: what has to be installed. cards: how many GPUs. ranks: how many processes run it together, as torchrun
    starts them.
    greedy(obj): the token ids that the call chooses, one at a time by plain greedy decoding of the stock object; where
    the call itself does that, None. It tells near-ties from errors.
    """

    name: str
    about: str
    build: Callable[[Size], Built]
    packages: tuple[str, ...] = ()
    cards: int = 0
    ranks: int = 0
    greedy: Callable[[Any, Size], torch.Tensor] | None = None

    def missing(self, size: Size) -> str | None:
        """Why it cannot run here, or None."""
        if absent := [package for package in self.packages if find_spec(package) is None]:
            return f"{', '.join(absent)} not installed"
        cards = torch.cuda.device_count() if size.device.type == "cuda" else 0
        if cards < self.cards:
            return f"needs {self.cards} GPU{'s' * (self.cards > 1)}, {cards or 'none'} here"
        return None


def script(name: str, about: str, **given: Any) -> Callable[[Callable[[Size], Built]], Script]:
    """Makes a Script of the function that builds it."""
    return lambda build: Script(name, about, build, **given)
