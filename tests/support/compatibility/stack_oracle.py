"""The step cache of transformers by its definition: a stock one, whose blocks' outputs are exchanged by hooks."""

import inspect

import torch

from support.compatibility.diffusers_calls import inputs
from support.compatibility.tiny_diffusers_models import build

STEPS = torch.tensor([950.0, 800.0, 650.0, 500.0, 350.0, 200.0, 80.0])
BOTH, ROWS = ("encoder_hidden_states", "hidden_states"), ("hidden_states",)
# By class: its lists of blocks, what each takes and gives; the first block of the first list runs in every call.
STACKS = {
    "FluxTransformer2DModel": {"transformer_blocks": BOTH, "single_transformer_blocks": BOTH},
    "Flux2Transformer2DModel": {"transformer_blocks": BOTH, "single_transformer_blocks": ROWS},
    "HunyuanVideoTransformer3DModel": {"transformer_blocks": BOTH[::-1], "single_transformer_blocks": BOTH[::-1]},
    "LTXVideoTransformer3DModel": {"transformer_blocks": ROWS},
    "PixArtTransformer2DModel": {"transformer_blocks": ROWS},
    "QwenImageTransformer2DModel": {"transformer_blocks": BOTH},
    "SD3Transformer2DModel": {"transformer_blocks": BOTH},
    "WanTransformer3DModel": {"blocks": ROWS},
    "ZImageTransformer2DModel": {"layers": ("x",)},
}
LISTS = ("num_layers", "num_single_layers", "n_layers")


def deep(name, blocks=4, **more):
    """A tiny transformer with so many blocks in each list, in evaluation mode, and what it is called with."""
    shallow = build(name)
    config = {key: value for key, value in shallow.config.items() if not key.startswith("_")}
    torch.manual_seed(1)
    model = type(shallow)(**config | {key: blocks for key in LISTS if key in config} | more).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.float() + 0.05 * torch.randn(parameter.shape)
    return model, inputs(model)


def timestep_of(model):
    return next(name for name in inspect.signature(type(model).forward).parameters if name in ("timestep", "t"))


def loop(model, given, steps=STEPS):
    """Calls of a loop: another sample and timestep in every one, all else the same tensors."""
    name, sample = timestep_of(model), next(iter(given))
    scale = 1 if "Flux" in type(model).__name__ or "Qwen" in type(model).__name__ else 1000
    calls = []
    for number, step in enumerate(steps):
        time = step.expand(given[name].shape) / 1000 * scale
        moved = [one + 0.1 * number for one in given[sample]] if isinstance(given[sample], list) else None
        calls.append(given | {name: time, sample: moved or given[sample] + 0.1 * number})
    return calls


class StackOracle:
    """Written down from the definition. After whole calls at a and b, blocks from the second on add in call i

    r(b) + (r(b) - r(a)) (i - b) / (b - a) / 2, where r is what they added in a whole call. streams: calls in a step.
    """

    def __init__(self, model, interval, streams=1):
        self.model, self.interval, self.streams = model, interval, streams
        model.register_forward_pre_hook(lambda *args: setattr(self, "calls", self.calls + 1))
        for place, (name, rows) in enumerate(STACKS[type(model).__name__].items()):
            deep = list(getattr(model, name))[place == 0 :]
            for block in deep:
                edge = block is deep[0], block is deep[-1]
                block.register_forward_pre_hook(self.entering(name, rows, edge), with_kwargs=True)
                block.register_forward_hook(self.leaving(name, rows, edge), with_kwargs=True)
        self.restart()

    def restart(self):
        self.calls, self.entry, self.kept = -1, {}, {}

    @property
    def step(self):
        return self.calls // self.streams

    @property
    def whole(self):
        return self.step % self.interval == 0

    def taken(self, block, rows, args, kwargs):
        bound = inspect.signature(type(block).forward).bind(block, *args, **kwargs).arguments
        return [bound[name].clone() for name in rows]

    def entering(self, name, rows, edge):
        def enter(block, args, kwargs):
            if edge[0] and self.whole:
                self.entry[name] = self.taken(block, rows, args, kwargs)

        return enter

    def leaving(self, name, rows, edge):
        def leave(block, args, kwargs, output):
            given = output if isinstance(output, tuple) else (output,)
            if self.whole:
                if edge[1]:
                    pairs = zip(given, self.entry[name], strict=True)
                    added = [None if after is None else after - before for after, before in pairs]
                    key = name, self.calls % self.streams
                    self.kept[key] = [*self.kept.get(key, [])[-1:], (self.step, added)]
                return None
            rows_now = self.taken(block, rows, args, kwargs)
            if edge[1]:
                rows_now = [self.ended(name, at, one) for at, one in enumerate(rows_now)]
            return tuple(rows_now) if isinstance(output, tuple) else rows_now[0]

        return leave

    def ended(self, name, at, row):
        kept = self.kept[name, self.calls % self.streams]
        b, newest = kept[-1]
        if newest[at] is None:
            return None
        line = newest[at].clone()
        if len(kept) == 2:
            a, older = kept[0]
            line += (newest[at] - older[at]) * (self.step - b) / (b - a) / 2
        return row + line
