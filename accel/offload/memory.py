"""Addresses of a GPU that have memory behind them only while something lies there.

A CUDA graph reads weights at fixed addresses, and torch's allocator gives freed memory to the next request. So
addresses are reserved by the driver's virtual memory management, and memory is mapped to them and unmapped.
"""

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import torch
from accel_kernels.device import cuda_driver

from accel.errors import logged

DEVICE, PINNED, READ_WRITE = 1, 1, 3  # of the driver's enumerations of locations, allocations, access
PORTABLE, MAPPED = 1, 2  # of its flags of pinned memory: for every device, and readable by kernels
OUT_OF_MEMORY = 2
PAGE, LARGE_PAGE = 4096, 2**21  # bytes
HUGE_PAGES = 14  # MADV_HUGEPAGE


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Allocation(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


def call(name: str, *args: Any) -> None:
    """Raises torch.OutOfMemoryError, or RuntimeError with the driver's number for what else it refuses."""
    code = getattr(cuda_driver(), name)(*args)
    if code == OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{name}: no memory is left on the device")
    if code:
        raise RuntimeError(f"{name} failed with the driver's error {code}")


def size(number: int) -> ctypes.c_size_t:
    """An argument of the driver: bytes."""
    return ctypes.c_size_t(number)


def address(number: int) -> ctypes.c_uint64:
    """An argument of the driver: an address."""
    return ctypes.c_uint64(number)


class Addresses:
    """A range of addresses of one GPU, reserved for as long as this object lives."""

    def __init__(self, device: torch.device, nbytes: int):
        self.device = device
        self.properties = Allocation(PINNED, 0, Location(DEVICE, device.index or 0))
        unit = ctypes.c_size_t()
        call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self.properties), 0)
        self.nbytes = -(-nbytes // unit.value) * unit.value
        start = ctypes.c_uint64()
        call("cuMemAddressReserve", ctypes.byref(start), size(self.nbytes), size(0), address(0), address(0))
        self.start = start.value

    def __del__(self) -> None:
        if hasattr(self, "start"):
            _quietly(lambda: call("cuMemAddressFree", address(self.start), size(self.nbytes)))

    def map(self) -> "Mapping":
        """Memory of the device behind these addresses. Raises torch.OutOfMemoryError where there is too little."""
        torch.cuda.synchronize(self.device)  # makes its context the current one of this thread
        try:
            return Mapping(self)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return Mapping(self)


class DeviceBytes:
    """Bytes that the device reads and writes at these addresses. `holds` lives as long as a tensor over them."""

    def __init__(self, device: torch.device, start: int, nbytes: int, holds: object = None):
        self.device, self.start, self.nbytes, self.holds = device, start, nbytes, holds

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self.start, False)
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": data, "strides": None, "version": 2}

    def tensor(self) -> torch.Tensor:
        """All of them. The tensor, and every view of it, keeps the memory."""
        with torch.cuda.device(self.device), torch.inference_mode(False):
            return torch.as_tensor(self, device=self.device)


class Mapping(DeviceBytes):
    """The memory behind a range of addresses. It stays for as long as a tensor over it does, whoever holds that."""

    def __init__(self, addresses: Addresses):
        super().__init__(addresses.device, addresses.start, addresses.nbytes)
        self.addresses = addresses
        handle = ctypes.c_uint64()
        where, length = address(addresses.start), size(addresses.nbytes)
        call("cuMemCreate", ctypes.byref(handle), length, ctypes.byref(addresses.properties), address(0))
        try:
            call("cuMemMap", where, length, size(0), handle, address(0))
        finally:
            call("cuMemRelease", handle)  # a mapping keeps the memory
        self.mapped = True
        access = Access(addresses.properties.location, READ_WRITE)
        call("cuMemSetAccess", where, length, ctypes.byref(access), size(1))

    def __del__(self) -> None:
        if hasattr(self, "mapped"):
            _quietly(self._unmap)

    def _unmap(self) -> None:
        torch.cuda.synchronize(self.addresses.device)  # what still reads it
        call("cuMemUnmap", address(self.addresses.start), size(self.addresses.nbytes))


class HostBuffer:
    """Bytes on the CPU, which copies to and from a GPU need not wait for once they are pinned."""

    def __init__(self, nbytes: int):
        with torch.inference_mode(False):
            self.bytes = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        _in_large_pages(self.bytes)
        self.pinned = False
        self.pinned_bytes = 0  # from the first one

    def pin(self, most: int | None = None, empty: bool = False) -> None:
        """In place. Where the system refuses, copies are as slow as stock's. most: bytes that may be pinned. empty:
        nothing is there yet.
        """
        nbytes = self.bytes.nbytes if most is None else min(most, self.bytes.nbytes)
        if not self.pinned and nbytes:
            if empty:
                self.bytes[:nbytes:PAGE].zero_()  # by many threads; the driver would touch page after page
            runtime: Any = torch.cuda.cudart()
            self.pinned = int(runtime.cudaHostRegister(self.bytes.data_ptr(), nbytes, PORTABLE | MAPPED)) == 0
            self.pinned_bytes = nbytes * self.pinned
            if not self.pinned:  # the next launch of torch's would find the error and raise it
                _quietly(lambda: torch.empty(1, device="cuda").fill_(1))

    def on_device(self, device: torch.device) -> torch.Tensor:
        """What is pinned, as the device reads it over the bus, or on a CPU all."""
        if device.type == "cpu":
            return self.bytes
        start = ctypes.c_uint64()
        where = ctypes.c_void_p(self.bytes.data_ptr())
        torch.cuda.synchronize(device)  # makes its context the current one of this thread
        call("cuMemHostGetDevicePointer_v2", ctypes.byref(start), where, ctypes.c_uint(0))
        return DeviceBytes(device, start.value, self.pinned_bytes, self).tensor()

    def __del__(self) -> None:
        if getattr(self, "pinned", False):
            runtime: Any = torch.cuda.cudart()
            _quietly(lambda: runtime.cudaHostUnregister(self.bytes.data_ptr()))


def _in_large_pages(there: torch.Tensor) -> None:
    """Asks Linux for few large pages, which are there and pinned sooner. It may refuse."""
    start = -(-there.data_ptr() // PAGE) * PAGE
    nbytes = there.data_ptr() + there.nbytes - start
    if sys.platform == "linux" and nbytes > LARGE_PAGE:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), size(nbytes), HUGE_PAGES)


def _quietly(action: Callable[[], object]) -> None:
    """As an object dies, at the end of the process too, nobody is there to be told."""
    try:
        action()
    except Exception as error:
        logged(error)
