"""How much of a GPU's memory a capture takes."""

import torch

from accel.cuda_graphs.entry import Captured

DRIVERS = 64  # MiB of one graph's nodes at most: what goes beyond is another process's, which took it meanwhile


class CaptureMemory:
    """Measures from when it is made, which is after cached memory was given back."""

    def __init__(self, device: torch.device):
        self.device = device
        self.reserved, self.free = self._now()

    def _now(self) -> tuple[int, int]:
        return torch.cuda.memory_reserved(self.device), torch.cuda.mem_get_info(self.device)[0]

    def taken_mb(self, graph: Captured) -> float:
        """The pool's growth, the driver's memory for nodes, and what the graph reads that is in neither."""
        reserved, free = self._now()
        grown = (reserved - self.reserved) / 2**20
        nodes = (self.free - free) / 2**20 - grown
        return grown + min(max(nodes, 0.0), DRIVERS) + graph.beside_mb
