"""Groups of requests whose steps are on different devices at the same time, and in which order a device does them."""

import functools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum, auto

import torch


class Shared(Enum):
    """What the steps of all groups use on a device, each in its turn."""

    PAGES = auto()  # keys and values, their tables, and the memory of graphs
    DRAWS = auto()  # settings of requests, and the ids that were drawn last


class LaneStreams:
    """`count` groups of requests. Steps are launched by one thread, one after another, each with all that it does.

    On CUDA every group has a stream on each device, so a step waits for nothing but itself: a device begins that of the
    next group while another device goes on with this one. What steps share they use in turns, in the order in which
    they were launched; so a page that changes hands is as it would be in one stream. One group has the streams of its
    caller.
    """

    def __init__(self, devices: Iterable[torch.device], count: int):
        self.count = count
        found = dict.fromkeys(device for device in devices if device.type == "cuda")
        self.devices = list(found) if count > 1 else []
        self.streams = [[_stream(device, lane) for device in self.devices] for lane in range(count)]
        whose = [(device, what) for device in self.devices for what in Shared]
        self.done = {one: torch.cuda.Event() for one in whose}  # the last turn

    @contextmanager
    def taken(self, lane: int) -> Iterator[None]:
        """Inside, what is launched belongs to a step of this group, behind all that the caller's streams have to do."""
        with ExitStack() as stack:
            for stream in self.streams[lane]:
                stream.wait_stream(torch.cuda.current_stream(stream.device))
            here = torch.cuda.device(torch.cuda.current_device()) if self.devices else None
            for stream in self.streams[lane]:
                stack.enter_context(torch.cuda.stream(stream))
            if here is not None:
                stack.enter_context(here)
            yield

    @contextmanager
    def turn(self, device: torch.device, what: Shared) -> Iterator[None]:
        """Inside, what is launched on the device waits for the turns before, and those that follow wait for it."""
        done = self.done.get((device, what))
        if done is None:
            yield
            return
        stream = torch.cuda.current_stream(device)
        stream.wait_event(done)
        try:
            yield
        finally:
            done.record(stream)

    def join(self) -> None:
        """The caller's streams wait for all groups: what these read may be freed, or written by others, after that."""
        for streams in self.streams:
            for stream in streams:
                torch.cuda.current_stream(stream.device).wait_stream(stream)


@functools.cache
def _stream(device: torch.device, lane: int) -> torch.cuda.Stream:
    """That of a group, the same from engine to engine: torch keeps freed memory for the stream it was used on."""
    return torch.cuda.Stream(device)
