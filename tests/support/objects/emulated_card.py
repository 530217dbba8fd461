"""A piece of the host's memory in the place of a GPU's, that weights come to and leave."""

import ctypes

import numpy as np
import torch

THERE = torch.device("cpu", 0)  # equal to no other device, and yet the CPU


class Mapping(np.ndarray):
    """Memory that is overwritten as soon as nobody has a view of it."""

    def tensor(self):
        with torch.inference_mode(False):
            return torch.from_numpy(self)

    def __del__(self):
        if self.base is not None and type(self.base) is not Mapping:
            ctypes.memset(self.ctypes.data, 0xFF, self.nbytes)


class Addresses:
    def __init__(self, nbytes):
        self.nbytes, self.memory = nbytes, (ctypes.c_ubyte * nbytes)()
        self.start = ctypes.addressof(self.memory)

    def map(self):
        return np.frombuffer(self.memory, dtype=np.uint8).view(Mapping)
