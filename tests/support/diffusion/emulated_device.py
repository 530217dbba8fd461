"""A device of which every read is seen.

There is no GPU here, so one is emulated: its tensors are meta tensors, which have no values to read, with the values
kept beside them. Every read, and every copy between it and the host, is seen, as is an operation across the two.
"""

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "_linalg_check_errors"}


class Far(torch.Tensor):
    """A tensor on the emulated device: `meta` has its shape, strides and storage, `value` its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, meta, value):
        tensor = torch.Tensor._make_subclass(cls, meta)
        tensor.meta, tensor.value = meta, value
        return tensor


class EmulatedDevice(TorchDispatchMode):
    """While entered, "meta" is a device with values. `accesses`: what the host would have waited for, in order."""

    def __init__(self):
        super().__init__()
        self.accesses: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        far = [leaf for leaf in leaves if isinstance(leaf, Far)]
        near = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Far)]
        devices = {leaf.type for leaf in leaves if isinstance(leaf, torch.device)}
        name = func._schema.name.partition("::")[2]
        if not far and "meta" not in devices:
            return func(*args, **(kwargs or {}))
        if any(tensor.is_meta for tensor in near):
            raise NotImplementedError(f"{name} of a tensor whose values torch made on the device by itself")
        if far and any(tensor.dim() for tensor in near):
            raise RuntimeError(f"{name}: tensors on two devices")

        def numbers(leaf):
            if isinstance(leaf, torch.device) and leaf.type == "meta":
                return torch.device("cpu")
            return leaf.value if isinstance(leaf, Far) else leaf

        given, named = pytree.tree_unflatten([numbers(leaf) for leaf in leaves], spec)
        value = func(*given, **named)
        if far and (name in READS or "cpu" in devices):
            self.accesses.append(name)
            return pytree.tree_map(self.put, value) if name == "nonzero" else value
        if not far:
            self.accesses += ["copy to the device"] if near else []
            return pytree.tree_map(self.put, value)
        metas = [leaf.meta if isinstance(leaf, Far) else leaf for leaf in leaves]
        given, named = pytree.tree_unflatten(metas, spec)
        arguments = {id(tensor.value): tensor for tensor in far}  # an operation in place returns one of them

        def paired(number, meta):
            if not isinstance(number, torch.Tensor):
                return number
            return arguments[id(number)] if id(number) in arguments else Far(meta, number)

        return pytree.tree_map(paired, value, func(*given, **named))

    @staticmethod
    def put(value):
        if not isinstance(value, torch.Tensor):
            return value
        return Far(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta"), value)
