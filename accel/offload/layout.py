"""Where each weight of a model lies in one run of bytes, on the CPU and on the GPU alike."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accel.offload.memory import DeviceBytes
from accel.patching.rule import set_data, unshare
from accel.patching.structure import LIBRARIES

CPU = torch.device("cpu")
PLAIN = (torch.Tensor, nn.Parameter)
UNIT = 256  # bytes: a weight begins at a multiple of it, as torch's own allocator has it


class Slot(NamedTuple):
    """A tensor of a model and its place. start: in bytes. run: where what lies side by side with it begins and ends."""

    tensor: torch.Tensor
    run: tuple[int, int]
    start: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def lies_in(self, whole: torch.Tensor) -> bool:
        """Whether the tensor is the view of these bytes that the layout makes it."""
        place = whole.data_ptr() + self.start if self.tensor.numel() else 0
        return form_of(self.tensor) == (place, self.shape, self.stride, self.dtype, whole.device)


class Layout:
    """The place of each tensor, in the order given. What lies side by side stays so; what shares memory goes on sharing
    it. So rows that may be one product's, as of queries, keys and values, come to lie one after the other.

    Raises ValueError where one memory holds elements of several dtypes.
    """

    def __init__(self, tensors: list[torch.Tensor]):
        self.slots: list[Slot] = []
        self.nbytes = 0
        begin = end = 0  # begin: what to add to an address; end: the address behind the tensors so far
        last: torch.Tensor | None = None
        runs: list[list[Slot]] = []
        seen = {place: i for i, place in reversed(list(enumerate(map(storage_of, tensors))))}
        for tensor in sorted(tensors, key=lambda one: (seen[storage_of(one)], one.data_ptr(), -_span(one))):
            place, span = tensor.data_ptr() or storage_of(tensor), _span(tensor)
            together = last is not None and storage_of(tensor) == storage_of(last) and place <= end
            if together and last is not None and last.dtype is not tensor.dtype:
                if place < end:
                    raise ValueError("weights of several dtypes share memory")
                together = False
            if not together:
                begin, end = -(-self.nbytes // UNIT) * UNIT - place, place
                runs.append([])
            runs[-1].append(Slot(tensor, (0, 0), begin + place, tensor.shape, tensor.stride(), tensor.dtype))
            end, last = max(end, place + span), tensor
            self.nbytes = begin + end
            runs[-1][0] = runs[-1][0]._replace(run=(runs[-1][0].start, self.nbytes))
        self.slots = [slot._replace(run=run[0].run) for run in runs for slot in run]
        self.nbytes = -(-self.nbytes // UNIT) * UNIT

    def pack(self, whole: torch.Tensor) -> None:
        """Moves every tensor to its place in these bytes; a storage is freed as soon as it is empty."""
        with as_ordinary():
            for slot, view in views(self.slots, whole):
                view.copy_(slot.tensor.detach())
                become(slot.tensor, view)


def views(slots: Iterable[Slot], whole: torch.Tensor, apart: bool = False) -> Iterator[tuple[Slot, torch.Tensor]]:
    """The place of each of these tensors in the bytes. Those of a run have a storage, which is all that torch.save
    writes of them; of others stock makes copies to save them. apart: on a GPU too, where a storage takes 12 us.
    """
    typed: dict[tuple, torch.Tensor] = {}
    apart = apart or whole.device.type == "cpu"
    for slot in slots:
        start, end = slot.run if apart else (0, whole.nbytes)
        if (numbers := typed.get((slot.dtype, start, end))) is None:
            held = _by_itself(whole, start, end) if apart else whole
            numbers = typed[slot.dtype, start, end] = held.view(slot.dtype)
        place = numbers.storage_offset() + (slot.start - start) // numbers.itemsize
        yield slot, numbers.as_strided(slot.shape, slot.stride, place)


def _by_itself(whole: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """A part of these bytes, in a storage of its own that keeps them all."""
    if whole.device.type == "cpu":
        return torch.from_numpy(whole.numpy()[start:end])
    if start == end:  # no memory that a driver would know
        return whole.new_empty(0)
    return DeviceBytes(whole.device, whole.data_ptr() + start, end - start, holds=whole).tensor()


def lay_out(slots: Iterable[Slot], whole: torch.Tensor) -> None:
    """Makes the tensors views of these bytes, which hold their numbers already."""
    with as_ordinary():
        for slot, view in views(slots, whole):
            become(slot.tensor, view)


@contextmanager
def as_ordinary() -> Iterator[None]:
    """Inside, tensors are made and changed as ordinary ones, without gradients, whatever their classes would do."""
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        yield


def become(tensor: torch.Tensor, view: torch.Tensor) -> None:
    """Inside of `as_ordinary`: the tensor is this view."""
    if tensor.is_inference():
        set_data(tensor, lambda _: view)
    else:
        tensor.data = view


def form_of(tensor: torch.Tensor) -> tuple:
    """By which views of one memory are told apart."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def weights_in(model: nn.Module) -> list[torch.Tensor]:
    """Its parameters and buffers, each once, and what hangs on those of libraries' own classes, such as scales."""
    found = (one for m in model.modules() for one in (*m._parameters.values(), *m._buffers.values()) if one is not None)
    every = (part for one in found for part in ((one,) if type(one) in PLAIN else (one, *_hanging_on(one))))
    return list({id(tensor): tensor for tensor in every}.values())


def _hanging_on(holder: Any, depth: int = 2) -> Iterator[torch.Tensor]:
    """Tensors in attributes of a tensor that lies in memory, and in those of its attributes."""
    held = () if is_traceable_wrapper_subclass(holder) else getattr(holder, "__dict__", {}).values()
    for one in held:
        if isinstance(one, torch.Tensor):
            yield one
        elif depth and not isinstance(one, nn.Module | type):
            yield from _hanging_on(one, depth - 1)


def is_movable(tensor: torch.Tensor) -> bool:
    """Whether its bytes may lie elsewhere: it is of torch's own class, or of a library's that says what they mean."""
    kind = type(tensor)
    known = kind in PLAIN or kind.__module__.partition(".")[0] in LIBRARIES
    return known and not is_traceable_wrapper_subclass(tensor)


def unmovable(tensors: list[torch.Tensor], device: torch.device = CPU) -> str | None:
    """Why these, which are on this device, cannot lie in one run of bytes."""
    for tensor in tensors:
        if not is_movable(tensor):
            return f"a weight of type {type(tensor).__name__}"
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device != device:
            return f"a weight in {tensor.layout} of {tensor.dtype} on {tensor.device}"
        if tensor.grad is not None or tensor.is_conj() or tensor.is_neg():
            return "a weight with a gradient, or a conjugate or negative view"
    return None


def separate(model: nn.Module) -> None:
    """Each of its weights lies in memory of its own again."""
    with as_ordinary():
        for tensor in filter(is_movable, weights_in(model)):
            unshare(tensor)


def bytes_in(tensor: Any) -> int:
    """Of memory that it takes, or those that it is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.nbytes
    return sum(bytes_in(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


def storage_of(tensor: torch.Tensor) -> int:
    """The address at which the memory begins that it lies in; another number where it is made of several tensors, or
    has no memory.
    """
    if is_traceable_wrapper_subclass(tensor):
        return id(tensor)
    storage = tensor.untyped_storage()
    return storage._cdata if tensor.is_meta else storage.data_ptr()


def _span(tensor: torch.Tensor) -> int:
    """Bytes from its first element to behind its last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
