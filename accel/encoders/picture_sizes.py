"""What a tower's own code makes of the sizes of pictures alone, such as positions: made once for each, and kept."""

import inspect
import threading
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import torch

from accel.encoders.inputs import GRIDS
from accel.errors import reason_of
from accel.fusion.host_numbers import HostNumbers, on_host

MOST = 64  # sets of sizes that are kept: a megabyte or two, of the largest pictures


class Made(NamedTuple):
    """maker: of the library, given sizes first and then `more`. names: what its results are handed on by."""

    maker: Any
    args: tuple
    more: dict[str, Any]
    names: tuple[str, ...]

    def of(self, sizes: torch.Tensor) -> dict[str, Any]:
        found = _results(self.maker(sizes, *self.args, **self.more))
        held = {name: one for name, one in zip(self.names, found, strict=True) if one is not None}
        return {name: one.to(sizes.device) if isinstance(one, torch.Tensor) else one for name, one in held.items()}


class PictureSizes:
    """What the code of one tower makes of sizes, (pictures, 3), as keywords by which it takes what was made before."""

    def __init__(self, made: list[Made]):
        self.__setstate__({"made": made})

    def __getstate__(self) -> dict[str, Any]:
        return {"made": self.made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.made: list[Made] = state["made"]
        self.lock, self.kept = threading.Lock(), lru_cache(MOST)(self._make)

    def __call__(self, sizes: torch.Tensor) -> dict[str, Any]:
        """The keywords; waits for the GPU if the host does not know the sizes."""
        stream = torch.cuda.current_stream(sizes.device).cuda_stream if sizes.is_cuda else 0
        held = tuple(map(tuple, on_host(sizes).tolist()))
        return dict(self.kept(held, sizes.dtype, sizes.device, stream))

    def _make(self, sizes: tuple, dtype: torch.dtype, device: torch.device, stream: int) -> dict[str, Any]:
        """On the device, by the same kernels as ever. stream: on which they run, and what was made is read."""
        with torch.inference_mode(False), torch.no_grad():
            host = torch.tensor(sizes, dtype=dtype, device="cpu")
            there = host.to(device)
            with HostNumbers([(there, host)] if there is not host else []):
                return {name: one for made in self.made for name, one in made.of(there).items()}


class _Popped(dict):
    """Keywords of a call that notes which of them are asked for, and has none."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def pop(self, name: str, *default: Any) -> Any:
        self.names.append(name)
        return default[0] if default else None


def picture_sizes(tower: Any, call: dict[str, Any]) -> PictureSizes | None:
    """Of a tower, seen in one call of its own code; None where it makes nothing of sizes alone."""
    forward, sizes = inspect.unwrap(type(tower).forward), call.get(GRIDS)
    names = [name for name in forward.__code__.co_names if _is_maker(forward.__globals__.get(name))]
    if sizes is None or not names:
        return None
    found: list[Made] = []

    def noting(maker: Any) -> Any:
        def made(given: Any, *args: Any, **more: Any) -> Any:
            asked = _Popped()
            if given is sizes and more.get("kwargs") is not None:
                more = {name: one for name, one in more.items() if name != "kwargs"}
                result = _results(maker(given, *args, **more, kwargs=asked))
                tensors = any(isinstance(one, torch.Tensor) for one in (*args, *more.values()))
                if not tensors and len(result) == len(asked.names):
                    found.append(Made(maker, args, more, tuple(asked.names)))
            return maker(given, *args, **more)

        return made

    changed = {name: noting(forward.__globals__[name]) for name in names}
    own = FunctionType(
        forward.__code__, forward.__globals__ | changed, forward.__name__, forward.__defaults__, forward.__closure__
    )
    try:
        own(tower, **call)
    except Exception as error:  # code that needs what is around it
        reason_of(error)
        return None
    taken = [name for one in found for name in one.names]
    return PictureSizes(found) if found and len({*taken}) == len(taken) else None


def _is_maker(one: Any) -> bool:
    """Whether it is a function that looks into keywords for what was made before."""
    return inspect.isfunction(one) and "kwargs" in inspect.signature(one).parameters


def _results(made: Any) -> tuple:
    return made if isinstance(made, tuple) else (made,)
