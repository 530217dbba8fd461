"""How much memory of a GPU tensors take."""

import gc

import torch
import torch.nn.functional as F


def allocated() -> int:
    """Bytes asked for and in use; cuBLAS's workspace is among them from the first call on.

    The allocator's own count is of whole blocks, up to 1 MiB larger each, by what was freed before.

    PyTorch takes that from its own allocator at the first product of a stream, and keeps it: 32 MiB on Hopper, which
    would be counted to whatever ran that first. Source: https://docs.pytorch.org/docs/stable/notes/cuda.html, "cuBLAS
    workspaces". A product with a bias goes by cuBLASLt, which may have one of its own.
    """
    x = torch.ones(32, 32, device="cuda", dtype=torch.bfloat16)
    for one in (x, x.float()):
        F.linear(one, one)
        F.linear(one, one, one[0])
    del x, one
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]
