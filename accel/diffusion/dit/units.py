"""What a schedule is made of: passes, products, and recorded steps that run as they were."""

from dataclasses import dataclass

from accel.diffusion.dit.lowering import Input, Output, Pass
from accel.diffusion.dit.program import TorchStep


@dataclass
class TorchCall:
    """A recorded step, run as it was."""

    step: TorchStep
    place: int

    @property
    def takes(self) -> set[int]:
        return set(self.step.taken)

    @property
    def makes(self) -> set[int]:
        return set(self.step.made)


@dataclass
class Copy:
    """A piece of a concatenation that no pass makes, put where it belongs."""

    source: Input
    output: Output
    place: int

    @property
    def takes(self) -> set[int]:
        return {self.source.number}

    @property
    def makes(self) -> set[int]:
        return {self.output.number}


@dataclass
class GeluProduct:
    """A linear and the GELU of it, by the tanh formula, which a product can do at its end."""

    step: TorchStep
    output: Output
    place: int

    @property
    def takes(self) -> set[int]:
        return set(self.step.taken)

    @property
    def makes(self) -> set[int]:
        return {self.output.number}


@dataclass
class StackedProduct:
    """Linears of one input, as one product whose columns are their results. output: rows of a tensor to write to."""

    steps: list[TorchStep]
    place: int
    output: Output | None = None

    @property
    def takes(self) -> set[int]:
        return {number for step in self.steps for number in step.taken}

    @property
    def makes(self) -> set[int]:
        into = () if self.output is None else (self.output.number,)
        return {*into, *(number for step in self.steps for number in step.made)}


Unit = Pass | TorchCall | Copy | GeluProduct | StackedProduct
