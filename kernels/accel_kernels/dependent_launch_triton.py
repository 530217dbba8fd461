"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits where it must.

Such a kernel says at its start that the next may come (gdc_launch_dependents), loads what no kernel before it writes,
its weights, and waits for the one before it (gdc_wait) ahead of everything else. Every program must wait before it
ends, also one without work, or a later kernel could overtake an earlier one.
"""

import torch

from accel_kernels.op import capability


def programmatic(device: torch.device) -> dict[str, bool]:
    """The launch option, where the GPU has it (compute capability 9.0 and later); {} elsewhere."""
    return {"launch_pdl": True} if device.type == "cuda" and capability(device) >= (9, 0) else {}
