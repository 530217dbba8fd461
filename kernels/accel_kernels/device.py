"""What kernels and their launchers know of a GPU: one `Card`, of its size and features; and whether it is interpreted.

ACCEL_CARD in the environment puts another in its place, see `made_of`.
"""

import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import cache, cached_property, lru_cache
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

import torch

VALID = (
    "give a compute capability such as 8.9, or a file that `accel doctor` wrote, and after it, by commas, any of "
    "processors=36, memory=12GB, bus=0.5 (a share of its speed), none more than there is"
)
SETTINGS: dict[str, Callable[[str], Any]] = {
    "processors": int, "memory": lambda text: int(1e9 * float(text.removesuffix("GB"))), "bus": float,
}  # fmt: skip


class Feature(Enum):
    """What some generations lack. Each value is what a reason calls it."""

    TRITON = "what Triton compiles for"
    BFLOAT16 = "bfloat16 products"
    WIDE_PRODUCTS = "tensor core products of 16 columns"  # mma.sync m16n8k16, of bytes m16n8k32
    FLOAT8 = "float8 conversions"
    FLOAT8_AT_ONCE = "float8 conversions of float32 in one rounding"
    DEPENDENT_LAUNCH = "programmatic dependent launch"
    TMA = "a tensor memory accelerator"
    SHARED_OPERANDS = "tensor cores that read shared memory"  # wgmma or tcgen05: operands take no registers
    WARPGROUPS = "products of warpgroups"  # wgmma


SINCE = {
    Feature.TRITON: (7, 0), Feature.BFLOAT16: (8, 0), Feature.WIDE_PRODUCTS: (8, 0), Feature.FLOAT8: (8, 9),
    Feature.FLOAT8_AT_ONCE: (9, 0), Feature.DEPENDENT_LAUNCH: (9, 0), Feature.TMA: (9, 0),
}  # fmt: skip
OF_SOME = {Feature.SHARED_OPERANDS: (9, 10, 11), Feature.WARPGROUPS: (9,)}  # by the first number of a capability
# KB of shared memory that one program may have.
ROOM = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
MEASURED = ((9, 0),)  # where all tests of kernels have run: elsewhere kernels check themselves, see `self_check`


@dataclass(frozen=True)
class Card:
    """A GPU. compute: its capability. shared_memory: bytes of it that one program may have. memory, l2: bytes.

    bandwidth, rate: bytes of memory and floating point operations of 16-bit products a second, as `accel doctor`
    measures them; 0 where nobody did. bus: share of the speed at which weights that stream come to the card.
    """

    name: str
    compute: tuple[int, int]
    processors: int
    shared_memory: int
    memory: int = 0
    l2: int = 0
    bandwidth: float = 0.0
    rate: float = 0.0
    bus: float = 1.0

    @cached_property
    def features(self) -> frozenset[Feature]:
        if not triton_installed():
            return frozenset()
        some = {feature for feature, majors in OF_SOME.items() if self.compute[0] in majors}
        return frozenset({feature for feature, least in SINCE.items() if self.compute >= least} | some)

    @property
    def measured(self) -> bool:
        return self.compute in MEASURED

    def limited(self, compute: tuple[int, int]) -> "Card":
        """What of this card a generation has."""
        room = ROOM[max((one for one in ROOM if one <= compute), default=min(ROOM))] * 1024
        return replace(self, compute=compute, shared_memory=min(self.shared_memory, room))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "Card":
        """From `to_dict`, or from JSON. Raises TypeError and ValueError for what is no card."""
        major, minor = fields["compute"]
        known = fields | {"compute": major, "bus": fields.get("bus", 1.0)}
        counts = "compute", "processors", "shared_memory"
        wrong = [name for name in counts if type(known[name]) is not int or known[name] < 1]
        wrong += ["name"] * (type(known["name"]) is not str)
        wrong += ["compute"] * (type(minor) is not int or minor < 0)
        wrong += [name for name in ("memory", "l2", "bandwidth", "rate") if not 0 <= known.get(name, 0) < inf]
        if wrong or not 0 < known["bus"] <= 1:
            told = known | {"compute": fields["compute"]}
            raise ValueError(", ".join(f"{name}={told[name]!r}" for name in dict.fromkeys(wrong or ["bus"])))
        return cls(**fields | {"compute": (major, minor)})


INTERPRETER = Card("Triton's interpreter", (0, 0), 4, 160 * 1024)  # on CPU tensors; any number gives the same results
_REPLAYED: ContextVar[Card | None] = ContextVar("accel_kernels_card", default=None)


@contextmanager
def replayed(card: Card) -> Iterator[None]:
    """Inside, in this context, every GPU is this card to all that chooses."""
    token = _REPLAYED.set(card)
    try:
        yield
    finally:
        _REPLAYED.reset(token)


def read_card(file: Path) -> Card:
    """The card of a file that `accel doctor` wrote. Raises OSError, and ValueError where there is none in it."""
    try:
        return Card.of(json.loads(file.read_text())["card"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} has no card: {error}") from None


def made_of(found: Card, wanted: str) -> Card:
    """What ACCEL_CARD, as `wanted`, leaves of a card: what a generation has, or all as in a file of `accel doctor`;
    and smaller, see VALID. Raises ValueError for what is neither.
    """
    first, *settings = wanted.split(",")
    try:
        if "=" in first:
            settings.insert(0, first)
        elif (compute := first.partition("."))[0].isdigit() and compute[2].isdigit():
            found = found.limited((int(compute[0]), int(compute[2])))
        else:
            found = read_card(Path(first))
        for setting in settings:
            name, _, value = setting.partition("=")
            number = SETTINGS[name](value)
            if not 0 < number <= getattr(found, name):
                raise ValueError(f"{setting} of {getattr(found, name)}")
            found = replace(found, **{name: number})
    except (OSError, ArithmeticError, ValueError, KeyError) as error:
        raise ValueError(f"ACCEL_CARD={wanted!r}: {error}; {VALID}") from None
    return found


@lru_cache(maxsize=16)
def present_card(device: torch.device) -> Card:
    """The GPU that is there, or what ACCEL_CARD makes of it; torch then allocates no more than that has. Raises
    ValueError, see `made_of`.
    """
    given = torch.cuda.get_device_properties(device)
    room = given.shared_memory_per_block_optin  # type: ignore[attr-defined]
    compute = (given.major, given.minor)
    found = Card(given.name, compute, given.multi_processor_count, room, given.total_memory, given.L2_cache_size)
    wanted = os.environ.get("ACCEL_CARD")
    if not wanted:
        return found
    known = made_of(found, wanted)
    if known.compute < compute:  # its products too are that generation's
        os.environ.setdefault("TRITON_OVERRIDE_ARCH", "sm{}{}".format(*known.compute))
    if known.memory < found.memory:
        torch.cuda.set_per_process_memory_fraction(known.memory / found.memory, device.index)
    return known


def card(device: torch.device) -> Card:
    """What is known of a device; of a CPU, Triton's interpreter."""
    return INTERPRETER if device.type != "cuda" else _REPLAYED.get() or present_card(device)


def free_memory(device: torch.device) -> int:
    """Bytes of a CUDA device that torch may still take."""
    return min(torch.cuda.mem_get_info(device)[0], card(device).memory - torch.cuda.memory_reserved(device))


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device."""
    return card(device).processors


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have."""
    return card(device).shared_memory


def has(device: torch.device, feature: Feature) -> bool:
    """Whether this is a CUDA device with this feature."""
    return feature in card(device).features


def lacks(device: torch.device, *features: Feature) -> str | None:
    """Why a GPU takes no kernel that needs these features. None on a CPU too, whose interpreter has no generation."""
    missing = [one for one in features if device.type == "cuda" and not has(device, one)]
    return f"a GPU without {missing[0].value}" if missing else None


def on_tensor_cores(x: torch.Tensor) -> bool:
    """Whether products of its dtype are; others take many registers, and small tiles. On a CPU by the dtype alone."""
    return x.dtype != torch.float32 and lacks(x.device, Feature.WIDE_PRODUCTS) is None


def float8_reason(device: torch.device, *dtypes: torch.dtype) -> str | None:
    """Why a GPU cannot convert these dtypes, if float8_e4m3fn is among them."""
    return lacks(device, Feature.FLOAT8) if torch.float8_e4m3fn in dtypes else None


def programmatic(device: torch.device, wanted: bool = True) -> dict[str, bool]:
    """A kernel's constant PDL, and the option of a programmatic dependent launch where it is wanted and the GPU has it.

    Such a kernel starts while the one before it still runs. It first lets the next one start (gdc_launch_dependents)
    and loads weights, which no kernel writes. Then it waits for the one before it (gdc_wait). Every program must wait
    before it ends, also one without work, or a later kernel could overtake an earlier one.
    """
    return {"PDL": True, "launch_pdl": True} if wanted and has(device, Feature.DEPENDENT_LAUNCH) else {"PDL": False}


@cache
def cuda_driver() -> Any:
    """The library of NVIDIA's driver. Raises OSError where there is none."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


@cache
def triton_installed() -> bool:
    """On Windows torch brings none."""
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which knows no Gluon."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def upcast(dtype: torch.dtype) -> bool:
    """Whether operands become float32 before a product: Triton's interpreter multiplies bfloat16 as integers."""
    return interpreted() and dtype == torch.bfloat16
