"""How long a user waits for a run, and how long the host takes to launch it."""

import time
from collections.abc import Callable

import torch


def milliseconds(run: Callable, device: torch.device) -> tuple[float, float]:
    """Wall time of one run to its end, what the user waits for, and until the host has launched all of it.

    Of this stream: waiting for the whole device fails while another thread captures.
    """
    stream = torch.cuda.current_stream(device)
    stream.synchronize()
    start = time.perf_counter()
    run()
    launched = time.perf_counter()
    stream.synchronize()
    return 1000 * (time.perf_counter() - start), 1000 * (launched - start)
