"""`memory=`: which models stay on the card, which come for their turn, and which stream."""

import warnings
from bisect import bisect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch
from accel_kernels.device import card
from accel_kernels.gemm.quantized.dequantized_once import forget_dequantized, keep_dequantized
from torch import nn

from accel.errors import Refused
from accel.fusion.channels_last import ChannelsLast
from accel.libraries.hooks import HOOKS, is_offloaded, lift, offload_hooks
from accel.libraries.models import is_pipeline, pipelines_in
from accel.offload.blocks import check_whole, nbytes, sizes_of, streaming_blocks
from accel.offload.budget import ROOM_FOR_CALLS, Budget, WeightSizes, check_fits
from accel.offload.hooks import GPUS, SWITCH, clear_stock_forward
from accel.offload.layout import as_ordinary, separate, unmovable, weights_in
from accel.offload.streamed_model import StreamedModel
from accel.options import Options, bytes_of
from accel.patching.rule import Context, set_data
from accel.planning.plan import Row, StageReport, StageResult

RULE = "memory"


def card_of(models: Iterable[nn.Module]) -> torch.device:
    """The GPU that a model is on, or the current one. Raises Refused where there is none."""
    on = next((one.device for model in models for one in model.parameters() if one.device.type in GPUS), None)
    if on is not None:
        return on
    if not torch.cuda.is_available():
        raise Refused("memory=: a budget of a GPU's memory, and there is no CUDA GPU here")
    return torch.device("cuda", torch.cuda.current_device())


def budget_of(options: Options, device: torch.device) -> Budget:
    """What the options allow on this device, where they say."""
    whole = card(device).memory
    size = bytes_of("memory", options.memory, whole)
    ram = psutil.virtual_memory().total
    host = None if options.host_memory is None else bytes_of("host_memory", options.host_memory, ram)
    return Budget(min(size, whole or size), host)


class WeightsMoved:
    """Where weights lie changes. Undo brings each back to where it was; so does an error on the way."""

    def apply(self) -> None:
        try:
            self.move()
        except BaseException as error:
            self.undo()
            if isinstance(error, Refused) or not isinstance(error, ValueError | NotImplementedError):
                raise
            raise Refused(f"memory=: {error}") from error

    def check(self) -> None:
        """Nothing to conflict with: values, shapes and hooks that came later are the user's own."""

    def move(self) -> None: ...

    def undo(self) -> None: ...


class OffloadLifted(WeightsMoved):
    """Stock's offload by parts is taken off a model. Undo puts it back."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.back: Callable[[], object] | None = None

    def move(self) -> None:
        self.back = lift(self.model)

    def undo(self) -> None:
        if self.back is not None and is_offloaded(self.model):  # put on since, as by another pipeline: it comes first
            told = "another one moves it; take that off, then enable group or sequential offload again"
            warnings.warn(f"accel: the offload of a {type(self.model).__name__} is not put back: {told}", stacklevel=2)
        elif self.back is not None:
            self.back()
        self.back = None


class WeightsPlaced(WeightsMoved):
    """The weights of one model lie where the budget says."""

    def __init__(self, model: nn.Module, device: torch.device, budget: Budget, layout: ChannelsLast | None):
        self.model, self.device, self.budget, self.layout = model, device, budget, layout
        self.value: StreamedModel | None = None
        self.before: dict[torch.Tensor, torch.device] = {}

    def move(self) -> None:
        if not streaming_blocks(self.model) and nbytes(self.model) > self.budget.card:
            raise Refused(f"memory=: a {type(self.model).__name__} has no blocks that could stream")
        check_fits(sizes_of(self.model), self.budget, type(self.model).__name__)
        forget_dequantized()
        check_ram(weights_in(self.model))
        self.before = {one: one.device for one in weights_in(self.model)}
        self.value = StreamedModel(self.model, self.device, _as_it_is, self.budget, alone=True)
        if self.layout is not None and self.device.type == "cuda" and not self.layout.on_gpu:
            self.layout.apply(coming=True)
        self.value.enter()

    def undo(self) -> None:
        if not self.before:
            return
        if self.value is not None:
            self.value.let_go()
        self.value = None
        for one in weights_in(self.model):  # first what leaves, so that RAM holds nothing twice
            device = self.before.get(one, one.device)
            if device != one.device:
                with as_ordinary():
                    set_data(one, lambda data, device=device: data.to(device))
        separate(self.model)
        self.before = {}

    def again(self) -> "WeightsPlaced | None":
        """The same for the model while this is undone, where its weights are not on the GPU then."""
        there = all(one.device == self.device for one in weights_in(self.model))
        return None if there or is_offloaded(self.model) else type(self)(self.model, self.device, self.budget, None)

    def rows(self) -> list[tuple[str, str, str]]:
        return [] if self.value is None else self.value.rows()


def stay_together(models: Iterable[nn.Module], card: int) -> bool:
    """Whether all models of a pipeline are on the GPU at once, within a budget of so many bytes."""
    return sum(map(nbytes, models)) <= ROOM_FOR_CALLS * card


class PipelineTurns(WeightsMoved):
    """A pipeline's models come to the GPU in turns, as under stock's model offload, or stay where all fit."""

    def __init__(self, pipe: Any, device: torch.device, budget: Budget):
        self.pipe, self.device, self.budget = pipe, device, budget
        self.before: dict[nn.Module, torch.device] = {}
        self.added: dict[Any, set[str]] = {}  # attributes of each pipeline

    def move(self) -> None:
        models = models_of(self.pipe)
        for model in models:
            whole = hasattr(model, "decode")  # an autoencoder comes in one piece
            sizes = WeightSizes(nbytes(model), ()) if whole else sizes_of(model)
            check_fits(sizes, self.budget, type(model).__name__)
            reasons = filter(None, (unmovable([one], one.device) for one in weights_in(model)))
            if (why := next(reasons, None)) is not None:
                check_whole(model, self.budget, why)
        if self.hooked():
            return  # they are taken over as they are
        fits = stay_together(models, self.budget.card)
        if not fits:
            check_ram(one for model in models for one in weights_in(model))
        self.before = {model: next(iter(weights_in(model))).device for model in models}
        known = {pipe: set(vars(pipe)) for pipe in pipelines_in(self.pipe)}
        try:
            self.pipe.to(self.device) if fits else getattr(self.pipe, SWITCH)(device=self.device)
        finally:
            self.added = {pipe: (vars(pipe).keys() | {HOOKS}) - names for pipe, names in known.items()}
        if not fits and not self.hooked():
            raise Refused(f"memory=: models of a {type(self.pipe).__name__} go to the GPU and back in a way of its own")

    def again(self) -> "PipelineTurns | None":
        there = all(one.device == self.device for model in models_of(self.pipe) for one in weights_in(model))
        return None if there or self.hooked() else type(self)(self.pipe, self.device, self.budget)

    def hooked(self) -> bool:
        """Whether models take turns already."""
        return any(hook for pipe in pipelines_in(self.pipe) for hook in offload_hooks(pipe, GPUS))

    def undo(self) -> None:
        for pipe in self.added:
            pipe.remove_all_hooks()
        for model in {*self.before, *models_of(self.pipe)} if self.added else ():
            clear_stock_forward(model)
        for model, device in self.before.items():
            model.to(device)
        for pipe, names in self.added.items():
            for name in names:
                vars(pipe).pop(name, None)
        self.before, self.added = {}, {}


def examining(options: Options) -> AbstractContextManager:
    """Inside, models are examined, those that are to stream on the CPU, where numbers in few bits are slow to read."""
    return nullcontext() if options.memory is None else keep_dequantized(psutil.virtual_memory().available // 2)


def lift_offload(model: nn.Module, context: Context) -> StageResult:
    """First of a lone model's stages: what stock would bring part by part is brought by us."""
    return StageResult(() if context.options.memory is None else (OffloadLifted(model),))


def place_weights(model: nn.Module, context: Context) -> StageResult:
    """Last of a lone model's stages, when it is known what runs fused."""
    turns = context.find(TakesTurns)
    if context.options.memory is None or (turns is not None and id(model) in turns.models):
        return StageResult()
    device = card_of([model])
    placed = WeightsPlaced(model, device, budget_of(context.options, device), context.find(ChannelsLast))

    def report() -> StageReport:
        return StageReport([Row(path, RULE, "patched", f"{where}, {told}") for path, where, told in placed.rows()])

    return StageResult((placed,), report)


class TakesTurns:
    """The models, by id, that pipelines bring to the GPU."""

    def __init__(self, models: Iterable[nn.Module]):
        self.models = set(map(id, models))


def note_turns(context: Context, parts: Iterable[object]) -> None:
    """Which models take turns is known before the first is planned. Raises Refused for several that do not."""
    options, parts = context.options, list(parts)
    if options.memory is None:
        if options.host_memory is not None:
            raise ValueError(f"host_memory={options.host_memory!r}: give memory too, of the GPU")
        return
    held = [model for part in parts if is_pipeline(part) and hasattr(part, SWITCH) for model in models_of(part)]
    found = TakesTurns(held)
    if len([part for part in parts if isinstance(part, nn.Module) and id(part) not in found.models]) > 1:
        raise Refused("memory=: a budget is for one model, or for a pipeline that has enable_model_cpu_offload")
    context.shared.maps[-1][TakesTurns] = found


def models_of(pipe: Any) -> list[nn.Module]:
    """Those among its components that have weights."""
    return [part for part in pipe.components.values() if isinstance(part, nn.Module) and weights_in(part)]


def _as_it_is(model: nn.Module, device: torch.device) -> None:
    """Its layout is settled."""


def check_ram(weights: Iterable[torch.Tensor]) -> None:
    """Raises Refused where the CPU's memory does not hold what comes from a GPU, or from a mapped file."""
    files = _mapped_files()
    coming = (one for one in weights if one.device.type != "cpu" or bisect(files, one.data_ptr()) % 2)
    more, free = sum(one.nbytes for one in coming), psutil.virtual_memory().available
    if more > free:
        raise Refused(
            f"memory=: {more / 1e9:.1f} GB of weights go to the CPU's memory, of which {free / 1e9:.1f} are free"
        )


def _mapped_files() -> list[int]:
    """Addresses where files begin and end in turn, as of weights that libraries map; none where unknown."""
    try:
        lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text(errors="replace").splitlines()]
    except OSError:
        return []
    files = (line[0] for line in lines if len(line) == 6 and line[4] != "0" and not line[5].startswith("/dev/"))
    return [int(place, 16) for span in files for place in span.split("-")]


def pipeline_turns(pipe: Any, context: Context) -> PipelineTurns | None:
    """The patch that a pipeline's own plan begins with."""
    if context.options.memory is None:
        return None
    device = card_of(models_of(pipe))
    return PipelineTurns(pipe, device, budget_of(context.options, device))
