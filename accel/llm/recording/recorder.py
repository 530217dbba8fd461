"""What the layers of a language model do, seen once: the tensors that pass through them in a small stock run.

Temporary hooks note what goes into every module of every layer and what comes out; a temporary attention function and
mask function note queries, scale and mask. These are registered in transformers under a name of this recording, which
only copies of the model's configurations have, so other models are not affected. All is removed, also after an error.
"""

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from accel_kernels.attention.math_attention import math_attention
from torch import nn
from transformers import Conv1D, PreTrainedModel

from accel.errors import reason_of
from accel.in_flight import Here, listening
from accel.libraries.adapters import base, outer_modules
from accel.libraries.attention import eager_mask, lent_attention
from accel.libraries.cache import cache_given
from accel.llm.kv_cache.cache import PAIRS
from accel.llm.pipeline.device_hooks import StockHere, device_of, moved_to
from accel.llm.recording.implementation import foreign_attention, lent_configs, unpaged
from accel.llm.recording.inputs import example_ids, few, last_positions, most_configured
from accel.llm.recording.mask_tables import narrowed
from accel.llm.recording.plain_attention import plain_attention
from accel.llm.recording.position_table import PositionTable
from accel.llm.recording.record import Attended, Call, KeptState, LayerRecord, NotUnderstood, Record, Stored, Value
from accel.llm.recording.recording_cache import recording_cache
from accel.llm.recording.resting import Unwritten, model_side_effects, resting
from accel.patching.structure import placement

NAME = "accel_recording"
LINEARS = (nn.Linear, Conv1D)
AMPLIFIED = {torch.float16: 8.0}  # which a gated MLP multiplies by itself


def decoder_layers(model: PreTrainedModel, call: dict[str, Any] | None = None) -> tuple[str, nn.ModuleList]:
    """The stack of layers and its path: the ModuleList as long as the model is deep that a text goes through.

    Where there are several of that length, as of a vision and a text tower, the one that runs last before the output
    head; where there is none, as layers have several attentions that count each, the longest. call: a word where it is
    None. Raises NotUnderstood.
    """
    try:
        config = model.config.get_text_config()
    except ValueError as error:  # several texts
        raise NotUnderstood(f"its configuration names no one text model: {error}") from error
    depth = getattr(config, "num_hidden_layers", getattr(config, "depth", None))
    if not isinstance(depth, int):
        raise NotUnderstood("its configuration does not say how many layers it has")
    lists = {path: module for path, module in model.named_modules() if type(module) is nn.ModuleList and len(module)}
    lengths = {len(module) for module in lists.values()}
    most = depth if depth in lengths else max(lengths, default=0)
    if most and depth % most:
        lists = {}
    stacks = {path: module for path, module in lists.items() if len(module) == most}
    stacks = {path: stacks[path] for path in stacks if not any(path.startswith(f"{other}.") for other in stacks)}
    if not stacks:
        raise NotUnderstood(f"no list of {depth} layers")
    path = next(iter(stacks)) if len(stacks) == 1 else _last_to_run(model, stacks, call)
    return path, stacks[path]


def _last_to_run(model: PreTrainedModel, stacks: dict[str, nn.ModuleList], call: dict[str, Any] | None) -> str:
    """The path of the stack that ran last in a call of the model; of the first where it cannot run."""
    order = []

    def note(path: str, *_: object) -> None:
        order.append(path)

    if model_side_effects(model) is None:
        with listening((layer, partial(note, path)) for path, layers in stacks.items() for layer in layers):
            try:
                with resting(model), unpaged(model), Unwritten(model):
                    type(model).forward(model, **call or {"input_ids": example_ids(model, 1), "use_cache": False})
            except Exception as error:  # whatever a forward may raise
                reason_of(error)
    return order[-1] if order else next(iter(stacks))


Look = Callable[[LayerRecord, Record], None]


def record(
    model: PreTrainedModel,
    look: Look,
    scores: bool = False,
    amplified: bool = False,
    last: bool = False,
    far: bool = False,
    begin: int | None = None,
    own: bool = False,
    known: Record | None = None,
) -> Record:
    """One stock forward of the model on random tokens. Raises NotUnderstood where it cannot be run to be looked at.

    look: is shown every layer as soon as it has run; its record then forgets tensors, but for queries and keys with
    `scores`. amplified: outputs of linears are made many times larger, so that bends far from zero show. last: tokens
    stand at late positions, from `begin` on. far: layers are told that the cache holds as many, or a long text. known:
    an earlier run, whose mask functions are not asked again, nor tables of positions looked for. own: the model keeps
    its own attention; its masks are made by the functions of the earlier run.
    """
    path, layers = decoder_layers(model)
    if (foreign := foreign_attention([model, *layers.modules()])) is not None:
        raise NotUnderstood(foreign)
    kinds: dict = {}
    seen = Record([LayerRecord(layer, f"{path}.{number}", kinds) for number, layer in enumerate(layers)], own)
    if known is not None:
        seen.windows.update(known.windows)
    if own and known is not None:
        seen.masks += known.masks
    factor = AMPLIFIED.get(placement(model)[1], 64.0) if amplified else 1.0
    recorder = Recorder(seen, look, scores, factor, model)
    ids = example_ids(model, few(model))
    table = PositionTable(model, ids.shape[1])
    try:
        attached, shown = recorder.attached(model), recorder.until_shown
        with resting(model), math_attention(), Unwritten(model), attached, shown, narrowed(layers) as held:
            seen.tables = held
            if known is None:
                recorder.until_shown.enter_context(table)
            forward = type(model).forward
            given = cache_given(forward, recorder.cache) | (last_positions(model, ids, begin) if last else {})
            told = (most_configured(model) or 1 << 17) - ids.shape[1] if begin is None else begin
            recorder.length = told if far else 0
            forward(model, input_ids=ids, use_cache=True, **given)
    except Exception as error:  # whatever a forward may raise: a model that cannot run this call is not one we know
        raise NotUnderstood(f"{_refused(error)}: {reason_of(error)}") from error
    finally:
        del recorder.cache.recorder  # a circle, in which all that was seen would wait for the garbage collector
    for layer in seen.layers:
        layer.most_positions = table.most if known is None else known.layers[0].most_positions
    return seen


def _refused(error: Exception) -> str:
    """Whether it was the model that raised, such as one that takes only a cache of its own, or we who looked at it."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame in frames]
    raised = next(package for package in reversed(packages) if package != "torch")
    return "could not be examined" if raised == __name__.partition(".")[0] else "its forward refuses the examined call"


class Recorder:
    """Gathers a record while attached, and shows its layers to `look`. Calls on other threads are not its own.

    open: the calls under way, of a layer and of modules inside; current: the record of that layer. until_shown:
    contexts that end when the first layer has run. length: of the cache, as layers are told.
    """

    current: LayerRecord
    value: Callable[[torch.Tensor], Value] = Value  # how tensors are noted

    def __init__(self, record: Record, look: Look, scores: bool, amplified: float, model: PreTrainedModel):
        self.record, self.look, self.scores, self.amplified = record, look, scores, amplified
        self.open: list[Call] = []
        self.length = 0
        self.looking = False  # whoever looks may run modules
        self.until_shown = ExitStack()
        self.lent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what the cache gave, by its layers
        self.cache = recording_cache(self, model)
        self.thread, self.name = threading.get_ident(), f"{NAME}_{id(self):x}"

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as undo:
            for record in self.record.layers:
                if (device := device_of(record.layer)) is not None:
                    held = vars(record.layer)
                    undo.callback(held.__setitem__, "forward", held["forward"])
                    held["forward"] = StockHere(record.layer, held["forward"])
                    bring = Here(partial(self._bring, device))
                    undo.callback(record.layer.register_forward_pre_hook(bring, with_kwargs=True).remove)
                for module in self.heard(record.layer):
                    handle = module.register_forward_pre_hook(Here(self._enter), with_kwargs=True)
                    undo.callback(handle.remove)
                    handle = module.register_forward_hook(Here(self._leave), with_kwargs=True)
                    undo.callback(handle.remove)
            if self.record.own:
                yield
                return
            undo.enter_context(lent_attention(self.name, self._attend, self._mask))
            undo.enter_context(lent_configs(model, lambda _: self.name))
            yield

    def heard(self, layer: nn.Module) -> Iterator[nn.Module]:
        """The modules whose calls are noted."""
        return outer_modules(layer, LINEARS)

    def _bring(self, device: torch.device, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Does what accelerate's hook does, in its place: what is noted of a layer, and masks, are on its device."""
        if self.looking:
            return None
        there = moved_to((args, kwargs), device)
        for given, now in zip((*args, *kwargs.values()), (*there[0], *there[1].values()), strict=True):
            if now is not given:
                self.record.masks += [(now, function) for mask, function in self.record.masks if mask is given]
        return there

    def _elsewhere(self) -> bool:
        return threading.get_ident() != self.thread

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self.looking:
            return
        if not self.open:
            found = [record for record in self.record.layers if record.layer is module]
            if not found:
                raise NotUnderstood("its code calls the forward of a layer, not the layer")
            (self.current,) = found
        given = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)), None)
        parent = self.open[-1].module if self.open else None
        self.open.append(Call(module, parent, args, dict(kwargs), None if given is None else self.value(given)))

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict, result: Any) -> Any:
        if self.looking:
            return None
        call = self.open.pop()
        changed = self.amplified != 1.0 and isinstance(result, torch.Tensor) and isinstance(base(module), LINEARS)
        first = result = result * self.amplified if changed else result
        while isinstance(first, tuple | list) and first:
            first = first[0]
        call.made, call.result = self.value(first) if isinstance(first, torch.Tensor) else None, result
        if self.open:
            self.current.calls.append(call)
        else:
            self.current.ran = call
            self._show()
        return result if changed else None

    def _show(self) -> None:
        self.looking = True
        self.until_shown.close()
        try:
            self.look(self.current, self.record)
        finally:
            self.looking = False
        self.current.forget(self.scores)

    def stored(self, keys: torch.Tensor, values: torch.Tensor, index: int) -> None:
        """Called by the cache with what a layer stores."""
        if not self.open or any(one.attention is self.open[-1].module for one in self.current.writes):
            raise NotUnderstood("a layer stores keys and values twice, or something else does")
        if (before := self.current.stored) is not None:
            self.current.earlier.append((before, self.current.attended))
            self.current.attended = None
        self.current.stored = Stored(self.open[-1].module, index, keys.clone(), values.clone())

    def kept(self, part: str, tensor: torch.Tensor, index: int, number: int) -> None:
        """Called by the cache with the inputs of a convolution, or a state. number: of several that a layer keeps."""
        if not self.open or number:
            raise NotUnderstood("a layer keeps several states, or something else does")
        if any(isinstance(one, PAIRS) for one in self.cache.layers[index : index + 1]):  # behind all layers
            index += len(self.cache.layers)
        kept = self.current.kept
        if kept is None:
            kept = self.current.kept = KeptState(self.open[-1].module, index)
        if kept.place != index or getattr(kept, part) is not None:
            raise NotUnderstood("a layer keeps several states")
        setattr(kept, part, tensor.clone())

    def _mask(self, *args: Any, mask_function: Callable, **kwargs: Any) -> torch.Tensor | None:
        mask = eager_mask(*args, mask_function=mask_function, **kwargs)
        if not self._elsewhere():
            self.record.masks.append((mask, mask_function))
        return mask

    def _attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        output = plain_attention(query, key, value, attention_mask, **options)
        if not self._elsewhere():
            self.record.asked = True
            self.current.attended = Attended(query.clone(), attention_mask, options, output.clone())
            mine = self.current.stored is None
            for place in (n for n, (k, v) in self.lent.items() if mine and k is key and v is value):
                self.current.borrowed = Stored(module, place, key.clone(), value.clone())
        return output, None
