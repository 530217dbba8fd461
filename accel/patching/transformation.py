"""What torch may be doing with a forward beside computing it: kernels of ours would not take part in it."""

import torch
from torch.autograd import forward_ad

# Tensors without numbers, and tensors that write down what is done with them.
TRACERS = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))


def transformation() -> str | None:
    """What this thread is inside of; None for nothing. Asked at every call, so it is kept cheap."""
    if torch._C._are_functorch_transforms_active():
        return "a transformation of torch.func is under way"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is on"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit traces it"
    if torch._C._len_torch_dispatch_stack() and any(map(torch._C._get_dispatch_mode, TRACERS)):
        return "torch traces it, or runs it on fake tensors"
    return None
