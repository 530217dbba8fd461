"""The state of models, to be compared: before and after, or between one and its copy."""

import torch


def snapshot(root: torch.nn.Module) -> dict:
    """What restore has to bring back: attributes by identity, containers by content, weights by value and stride."""
    state = {}
    for path, module in root.named_modules():
        for name, value in vars(module).items():
            content = tuple(value.items()) if isinstance(value, dict) else None
            state[path, name] = (id(value), None if content is None else tuple((k, id(v)) for k, v in content))
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        state["tensor", name] = (id(tensor), tensor.stride(), tensor.storage_offset(), tensor.detach().clone())
    return state


def assert_same_state(before: dict, after: dict) -> None:
    assert before.keys() == after.keys()
    for key, wanted in before.items():
        if key[0] == "tensor":
            assert wanted[:3] == after[key][:3], key
            assert torch.equal(wanted[3], after[key][3]), key
        else:
            assert wanted == after[key], key


def differences(ours: object, stock: object) -> list[str]:
    """Names of attributes, weights and strides, on any module of the two, that are not the same in both."""
    found = []
    ours, stock = (dict(x.named_modules()) if isinstance(x, torch.nn.Module) else {"": x} for x in (ours, stock))
    for path in ours.keys() | stock.keys():
        pair = [vars(modules[path]) if path in modules else {} for modules in (ours, stock)]
        for name in pair[0].keys() | pair[1].keys():
            mine, theirs = (described(attributes.get(name)) for attributes in pair)
            if mine != theirs:
                found.append(f"{path}.{name}: {mine}, stock {theirs}")
    return found


def described(value, depth: int = 3):
    """A value in a form that can be compared between an object and its deep copy."""
    if isinstance(value, torch.Tensor):
        bits = None if value.is_meta else value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        where = (type(value).__name__, value.dtype, value.device, tuple(value.shape), value.stride())
        return where, None if bits is None else hash(bits.tobytes())
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return value
    if isinstance(value, dict) and depth:
        keys = (number if isinstance(key, int) else str(key) for number, key in enumerate(value))  # hooks are numbered
        return {key: described(item, depth - 1) for key, item in zip(keys, value.values(), strict=True)}
    if isinstance(value, list | tuple) and depth:
        return [described(item, depth - 1) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if hasattr(value, "__func__"):  # the class's own forward, left by a hook, is as good as none
        return None if value.__func__ is type(value.__self__).forward else value.__func__.__qualname__
    return type(value).__qualname__
