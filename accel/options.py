"""Every keyword of `accel.optimize`, validated before anything is touched."""

import dataclasses
from dataclasses import dataclass

ATTENTION = ("auto", "cudnn", "flash", "efficient", "xformers", "triton", "matmul", "sdpa")
LAYOUT = ("auto", "channels_last", "keep")


@dataclass(frozen=True)
class Options:
    """Options of `accel.optimize`; unknown names and wrong values raise TypeError or ValueError naming the valid ones.

    attention: "auto" measures the backends on this GPU once per shape and remembers the choice; or a backend's name.
    layout: "auto" and "channels_last" store convolution weights channels-last; "keep" leaves the layout alone.
    graphs: "auto" replays a CUDA graph per input shape where that is faster; True keeps it even where it is not;
        False never captures.
    graph_memory_gb: bound on the memory that captured graphs may hold, in GiB; None is a quarter of the GPU.
    strict: a skipped site raises ValueError, and nothing is changed.
    """

    attention: str = "auto"
    layout: str = "auto"
    graphs: bool | str = "auto"
    graph_memory_gb: float | None = None
    strict: bool = False

    def __post_init__(self):
        _one_of("attention", self.attention, ATTENTION)
        _one_of("layout", self.layout, LAYOUT)
        _one_of("graphs", self.graphs, ("auto", True, False))
        _one_of("strict", self.strict, (True, False))
        memory = self.graph_memory_gb
        if memory is not None:
            if isinstance(memory, bool) or not isinstance(memory, int | float):
                raise TypeError(f"graph_memory_gb={memory!r}: give a number of GiB or None")
            if not memory > 0:
                raise ValueError(f"graph_memory_gb={memory!r}: give a number above 0, or graphs=False")


def parse(given: dict) -> Options:
    """Options from keywords; an unknown name raises TypeError listing the valid ones."""
    valid = [field.name for field in dataclasses.fields(Options)]
    unknown = sorted(set(given) - set(valid))
    if unknown:
        raise TypeError(f"unknown option {', '.join(map(repr, unknown))}; valid options: {', '.join(valid)}")
    return Options(**given)


def _one_of(name: str, value: object, valid: tuple) -> None:
    if not any(type(value) is type(choice) and value == choice for choice in valid):
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, valid))}")
